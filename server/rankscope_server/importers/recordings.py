"""What other tools recorded of a run, recognised by content, as the records of an agent."""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from rankscope.files.flight_recorder import DumpError
from rankscope.importers.flight_dumps import OUR_COPY, rank_of, read_dumps
from rankscope.importers.flight_records import Imported, convert
from rankscope.wire.chunk import decode_chunk
from rankscope.wire.schema import IMPORTED, NODE_RANK, AnyRecord, RunStarted
from rankscope_server.analysis.state import RunState
from rankscope_server.importers.horovod_timeline import (
    TIMELINE,
    Timeline,
    import_timeline,
    read_timeline,
)
from rankscope_server.importers.json_events import TraceError
from rankscope_server.importers.nccl_log import NcclLogs
from rankscope_server.importers.nccl_tests import import_nccl_tests
from rankscope_server.importers.open_trace import NotATrace, read_open_trace, records_of, replay_of
from rankscope_server.importers.profiler_records import import_traces
from rankscope_server.importers.profiler_trace import RankTrace, read_trace
from rankscope_server.verdict.answers import Look

Format: TypeAlias = Literal[
    "flight-recorder", "open-trace", "profiler", "nccl-tests", "nccl-log", "horovod"
]
FORMATS: tuple[Format, ...] = get_args(Format)
OnBytes: TypeAlias = Callable[[int], None]  # how many bytes of the files were read since
_HEAD_BYTES = 64 << 10
_MAX_TEXT_BYTES = 256 << 20
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
_PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_DUMP = re.compile(rb'^\s*\{.{0,400}?"(pg_config|pg_status|nccl_version|entries|comm_lib_version)"',
                   re.DOTALL)  # fmt: skip
_NCCL_TESTS = re.compile(rb"#\s+size\s+count\s+.*type|# nThread \d+ nGpus \d+", re.IGNORECASE)
_NCCL_LOG = re.compile(rb"\] (?:\S+:\d+ )?NCCL (?:INFO|WARN) ")
LOOK_AFTER_NS = 10**9


class RecordingError(ValueError):
    """Nothing of it can be read; the message names the file and says what to do."""


@dataclass(slots=True)
class Recording:
    """What was read: of how many files in which format, and what was left out and why."""

    found: Imported
    formats: dict[Format, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @property
    def num_ranks(self) -> int:
        """Return of how many ranks something was read."""
        return len({record.rank for record in self.found.records if record.rank >= 0})


def format_of(path: Path) -> Format | None:
    """Return what kind of recording a file is, None for anything else. Raises OSError."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith(_GZIP):
        try:
            head = zlib.decompressobj(wbits=31).decompress(head, _HEAD_BYTES)
        except zlib.error:
            return None
    if head.startswith(_PARQUET):
        return "open-trace"
    if b'"traceEvents"' in head:
        return "profiler"
    if TIMELINE.match(head):
        return "horovod"
    if head.startswith(_PICKLES) or _DUMP.match(head):
        return "flight-recorder"
    if _NCCL_TESTS.search(head):
        return "nccl-tests"
    return "nccl-log" if _NCCL_LOG.search(head) else None


def jobs_of(paths: Iterable[Path]) -> list[list[Path]]:
    """Return the files of each job: dumps of the same ranks in two folders are two jobs'."""
    files = list(_files(paths))
    folders: dict[Path, list[Path]] = {}
    for path in files:
        folders.setdefault(path.parent, []).append(path)
    ranks = {folder: _dumped_ranks(inside) for folder, inside in folders.items()}
    of_dumps = [folder for folder, named in ranks.items() if named]
    is_apart = sum(len(ranks[folder]) for folder in of_dumps) > len(
        set().union(*(ranks[folder] for folder in of_dumps))
    )
    if not is_apart:
        return [files]
    rest = [path for path in files if path.parent not in of_dumps]
    return [folders[folder] for folder in of_dumps] + [rest] * bool(rest)


def _dumped_ranks(paths: Sequence[Path]) -> set[int]:
    """Return the ranks of the dumps in a folder; none of our copies, one folder for each rank."""
    found = set()
    for path in paths:
        if OUR_COPY.fullmatch(path.name):
            continue
        with contextlib.suppress(DumpError, OSError):
            if format_of(path) == "flight-recorder":
                found.add(rank_of(path))
    return found


def read_recordings(
    paths: Iterable[Path], forced: Format | None = None, on_bytes: OnBytes = lambda size: None
) -> Recording:
    """Read files and directories of files. Raises RecordingError if nothing could be read."""
    by_format: dict[Format, list[Path]] = {}
    left_out: list[str] = []
    jobs = jobs_of(paths)
    if len(jobs) > 1:
        folders = ", ".join(str(job[0].parent) for job in jobs)
        raise RecordingError(f"dumps of the same ranks in several folders are those of several "
                             f"jobs; name one folder at a time: {folders}")  # fmt: skip
    for path in jobs[0]:
        try:
            kind = forced or format_of(path)
        except OSError as error:
            left_out.append(f"{path}: {error.strerror or error}")
            continue
        if kind is None:
            left_out.append(f"{path}: no format that is known; --format forces one")
        else:
            by_format.setdefault(kind, []).append(path)
    parts: list[Imported] = []
    formats: dict[Format, int] = {}
    for kind, files in by_format.items():
        found, errors = _IMPORTERS[kind](files, on_bytes)
        left_out += errors
        if found is not None:
            parts.append(found)
            formats[kind] = max(1, len(files) - len(errors))
    if not parts:
        raise RecordingError(_nothing(left_out))
    return Recording(_joined(parts), formats, left_out)


def look_at(recording: Recording, run_id: str = "imported") -> Look:
    """Return what the detectors find in it, as of a moment after its newest record."""
    state = RunState(run_id)
    state.apply_record(
        RunStarted(
            attempt=0, rank=NODE_RANK, time_ns=min(one.time_ns for one in recording.found.records),
            name=run_id, launcher=IMPORTED,
        )
    )  # fmt: skip
    for record in recording.found.records:
        known: AnyRecord = record  # type: ignore[assignment]
        state.apply_record(known)
    for chunk in recording.found.chunks:
        state.apply_chunk(chunk, decode_chunk(chunk.data))
    return state.look(newest_ns(recording.found) + LOOK_AFTER_NS)


def newest_ns(found: Imported) -> int:
    """Return the newest time of what was read."""
    times = [record.time_ns for record in found.records]
    return max([*times, *(chunk.time_hi_ns for chunk in found.chunks)], default=0)


def _nothing(left_out: list[str]) -> str:
    if len(left_out) == 1:
        return left_out[0]
    first = f", first: {left_out[0]}" if left_out else ""
    return f"no recording in what was named ({len(left_out)} files left out{first})"


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the files meant; of a directory all below it, in the order of their numbers."""
    for path in paths:
        if path.is_dir():
            inside = (one for one in path.rglob("*") if one.is_file())
            yield from sorted(inside, key=lambda one: (len(one.name), str(one)))
        else:
            yield path


def _joined(parts: list[Imported]) -> Imported:
    whole = Imported(max(part.world_size for part in parts))
    for part in parts:
        whole.records += part.records
        whole.chunks += part.chunks
        whole.num_open += part.num_open
    return whole


def _flight_dumps(files: list[Path], on_bytes: OnBytes) -> tuple[Imported | None, list[str]]:
    dumps, left_out = read_dumps(files)
    return (convert(dumps) if dumps else None), left_out


def _open_trace(files: list[Path], on_bytes: OnBytes) -> tuple[Imported | None, list[str]]:
    """Read one trace: it holds all ranks; its times have no date, so that of the file counts."""
    left_out = [f"{path}: one open trace makes a run; import it alone" for path in files[1:]]
    path = files[0]
    try:
        on_bytes(path.stat().st_size)
        trace = read_open_trace(path)
        records, chunks = records_of(trace, replay_of(trace), path.stat().st_mtime_ns)
    except NotATrace as error:
        text = str(error)
        return None, [text if str(path) in text else f"{path}: {text}", *left_out]
    found = Imported(len(trace.ranks), list(records), chunks)
    return found, left_out


def _profiler(files: list[Path], on_bytes: OnBytes) -> tuple[Imported | None, list[str]]:
    traces: dict[int, RankTrace] = {}
    left_out = []
    for path in files:
        try:
            trace = read_trace(path, on_bytes)
        except TraceError as error:
            left_out.append(str(error))
            continue
        if not trace.steps:
            left_out.append(f"{path}: no step in it; call the profiler's step() in the loop")
        elif trace.rank in traces:
            if not traces[trace.rank].join(trace):
                left_out.append(
                    f"{path}: a second trace of steps of rank {trace.rank}; the first one counts"
                )
        else:
            traces[trace.rank] = trace
    if not traces:
        return None, left_out
    try:
        return import_traces(traces), left_out
    except ValueError as error:
        return None, [*left_out, f"{files[0].parent}: {error}"]


def _horovod(files: list[Path], on_bytes: OnBytes) -> tuple[Imported | None, list[str]]:
    """Read one timeline: rank 0 writes that of all ranks."""
    left_out = [f"{path}: one timeline makes a run; import it alone" for path in files[1:]]
    try:
        timeline = read_timeline(files[0], on_bytes)
    except TraceError as error:
        return None, [str(error), *left_out]
    return import_timeline(timeline), [*_without_ticks(files[0], timeline), *left_out]


def _without_ticks(path: Path, timeline: Timeline) -> list[str]:
    missing = sum(not one.ready_us for one in timeline.operations)
    if not missing:
        return []
    return [
        f"{path}: {missing:,} of {len(timeline.operations):,} collectives, of which Horovod's "
        "cache hides when each rank was ready; HOROVOD_CACHE_CAPACITY=0 shows it"
    ]


def _nccl_tests(files: list[Path], on_bytes: OnBytes) -> tuple[Imported | None, list[str]]:
    parts, left_out = [], []
    for path in files:
        try:
            on_bytes(path.stat().st_size)
            if path.stat().st_size > _MAX_TEXT_BYTES:
                raise ValueError(f"has more than {_MAX_TEXT_BYTES >> 20} MiB")
            text = path.read_text(errors="replace")
            parts.append(import_nccl_tests(text, path.stat().st_mtime_ns))
        except (OSError, ValueError) as error:
            left_out.append(f"{path}: {error}")
    return (_joined(parts) if parts else None), left_out


def _nccl_logs(files: list[Path], on_bytes: OnBytes) -> tuple[Imported | None, list[str]]:
    """Read logs of one job together: where they have no time, all end with the newest of them."""
    logs = NcclLogs(max(int(path.stat().st_mtime_ns) for path in files))
    left_out = []
    for path in files:
        try:
            logs.read(path, on_bytes)
        except (OSError, ValueError) as error:
            left_out.append(f"{path}: {error}")
    try:
        found = logs.convert()
    except ValueError as error:
        return None, [*left_out, f"{files[0]}: {error}"]
    return found, [*left_out, *logs.left_out]


_IMPORTERS: dict[Format, Callable[[list[Path], OnBytes], tuple[Imported | None, list[str]]]] = {
    "flight-recorder": _flight_dumps,
    "open-trace": _open_trace,
    "profiler": _profiler,
    "nccl-tests": _nccl_tests,
    "nccl-log": _nccl_logs,
    "horovod": _horovod,
}
