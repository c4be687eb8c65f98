"""Logs that NCCL writes with NCCL_DEBUG=INFO (also GRAPH, TUNING), as records of their ranks.

A line is `host:pid:thread [device] NCCL INFO text`, with a time before it in newer versions. The
rank of a process and device is the one in its largest communicator; names of algorithms and
protocols are those of NCCL's own table (nccl_common.h). What should agree among ranks becomes a
fact; what differs by design (rings, trees, peers) an event.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from rankscope.importers.flight_records import Imported
from rankscope.wire import schema
from rankscope.wire.redaction import clean
from rankscope_server.known_errors.line_owner import rank_of_path
from rankscope_server.known_errors.load import KnownErrors, known_errors

Key: TypeAlias = tuple[str, int, int]  # host (or the file, where lines name none), pid, device
_GZIP = b"\x1f\x8b"
_MAX_LINES = 5_000  # kept of one rank
_MAX_LINE = 8_000
_MAX_PARTS = 64  # rings, trees and transports of one rank
_STEP_NS = 1_000  # between lines without a time: they stay in order
_INFO, _WARNING = 20, 30
_LINE = re.compile(
    r"(?:(?P<host>[A-Za-z0-9_.<>-]+):(?P<pid>\d+):\d+ )?\[(?P<device>-?\d+)\] "
    r"(?:(?P<place>\S+:\d+) )?NCCL (?P<level>INFO|WARN|ERROR) (?P<text>.*)"
)
_VERSION = re.compile(r"NCCL version (\S+)")
_TIME = re.compile(r"\[(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)")
_COMM = re.compile(r"comm \S+ rank (\d+) nranks (\d+)", re.IGNORECASE)
_CHANNEL = re.compile(r"(?:Channel|Ring) \S+ : .*->.* via (\S+)")
_RING = re.compile(r"Channel (\d+)/\d+ :((?:\s+\d+)+)\s*$")
_TREES = re.compile(r"Trees? (\[.*)")
_GRAPH = re.compile(r"Pattern \d+, crossNic .*")
_TUNING = re.compile(r"(\d+) Bytes -> Algo (\w+) proto (\w+) time ([\d.]+)")
_TIMINGS = re.compile(r"Init timings.*?: rank \d+ nranks \d+ total ([\d.]+) \((.*)\)")
_RETURN = re.compile(r"\S+:\d+ -> \d+")
_ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
_PROTOCOLS = ("LL", "LL128", "Simple")
# What should be the same on all ranks: fact, and the line that holds it.
_FACTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("nccl.version", _VERSION),
    ("nccl.network", re.compile(r"Using network (.+)")),
    ("nccl.nics", re.compile(r"NET/(?:IB|IBext\S*|UCX|OFI)\s*: Using (.+?)(?:; OOB .*)?$")),
    ("nccl.interfaces", re.compile(r"(?:NET/Socket|Bootstrap) : Using (.+)")),
    ("nccl.channels", re.compile(r"(\d+ coll channels, .*)")),
    ("cuda.driver_version", re.compile(r"cudaDriverVersion (\d+)")),
)
_VARIABLE = re.compile(r"(NCCL_\w+) set (?:by environment )?to (.+?)\.?$")
_ADDRESS = re.compile(r":\[?[0-9a-fA-F.:%]+\]?<\d+>")


@dataclass(slots=True)
class _Line:
    time_ns: int
    level: int
    text: str


@dataclass(slots=True)
class _Process:
    """What the lines of one process and device show."""

    host: str
    pid: int
    device: int
    rank: int = -1
    num_ranks: int = 0
    facts: dict[str, str] = field(default_factory=dict)
    topology: dict[str, Counter[str]] = field(default_factory=dict)
    init: dict[str, str] = field(default_factory=dict)
    lines: list[_Line] = field(default_factory=list)
    num_dropped: int = 0


class NcclLogs:
    """Takes logs of any number of files; a file may hold many ranks, a rank one file or several."""

    def __init__(self, time_ns: int) -> None:
        self.left_out: list[str] = []
        self._processes: dict[Key, _Process] = {}
        self._time_ns = time_ns
        self._version = ""  # printed once for all, by rank 0

    def read(self, path: Path, on_bytes: Callable[[int], None]) -> None:
        """Read one file. Raises ValueError, OSError."""
        now, found = self._time_ns, 0
        named = rank_of_path(str(path), False).rank
        for line in _lines(path, on_bytes):
            match = _LINE.search(line)
            if match is None:
                version = _VERSION.search(line)
                self._version = version[1] if version else self._version
                continue
            found += 1
            stamp = _TIME.search(line)
            stamp_ns = 0 if stamp is None else _ns(stamp)
            now = max(stamp_ns, now + _STEP_NS) if stamp_ns else now + _STEP_NS
            self._take(path, match, stamp_ns or now, named)
        if not found:
            raise ValueError("no line of NCCL in it; run with NCCL_DEBUG=INFO")

    def _take(self, path: Path, match: re.Match[str], time_ns: int, named: int | None) -> None:
        host, pid, device = match["host"] or "", int(match["pid"] or 0), int(match["device"])
        key = (host or str(path), pid, device)
        process = self._processes.get(key)
        if process is None:
            process = self._processes[key] = _Process(host, pid, device)
            if named is not None:
                process.rank = named
        text = match["text"]
        comm = _COMM.search(text)
        if comm is not None:
            rank, num_ranks = int(comm[1]), int(comm[2])
            if num_ranks >= process.num_ranks and rank < schema.MAX_RANK:
                process.rank, process.num_ranks = rank, num_ranks
        is_warning = match["level"] != "INFO"
        if not is_warning and _is_topology(process, text):
            return
        _learn(process, text)
        if match["place"] and is_warning:
            text = f"{match['place']} NCCL WARN {text}"
        if len(process.lines) >= _MAX_LINES and not is_warning:
            process.num_dropped += 1
            return
        level = _WARNING if is_warning or _RETURN.match(text) else _INFO
        process.lines.append(_Line(time_ns, level, clean(text)))

    def convert(self) -> Imported:
        """Return the records of all ranks. Raises ValueError where no rank is known."""
        ranks: dict[int, _Process] = {}
        nameless = 0
        for process in self._processes.values():
            if process.rank < 0:
                nameless += 1
            elif process.rank not in ranks:
                ranks[process.rank] = process
            else:
                _join(ranks[process.rank], process)
        if nameless:
            self.left_out.append(f"{nameless} processes whose rank is in no line and no file name")
        if not ranks:
            raise ValueError(
                "no line names a rank; give the log from its begin (Init COMPLETE names them), or "
                "call the file of rank 3 rank_3.log"
            )
        found = Imported(
            max(max(ranks) + 1, *(rank_trace.num_ranks for rank_trace in ranks.values()))
        )
        known = known_errors()
        for rank, process in sorted(ranks.items()):
            if self._version and rank == 0:  # which prints it, for itself
                process.facts.setdefault("nccl.version", self._version)
            _add_rank(found, rank, process, known, self._time_ns)
        return found


def _lines(path: Path, on_bytes: Callable[[int], None]) -> Iterator[str]:
    with path.open("rb") as file:
        is_packed = file.read(2) == _GZIP
        file.seek(0)
        stream: Iterable[bytes] = gzip.GzipFile(fileobj=file) if is_packed else file
        before = 0
        try:
            for number, line in enumerate(stream):
                if number % 4096 == 0:
                    on_bytes(file.tell() - before)
                    before = file.tell()
                yield line[:_MAX_LINE].decode(errors="replace").rstrip()
        except (EOFError, zlib.error, gzip.BadGzipFile):
            return  # of a job that was killed: what came before counts


def _ns(stamp: re.Match[str]) -> int:
    """Return the time in a line, taken for UTC: NCCL prints local time without its zone."""
    try:
        at = datetime.fromisoformat(f"{stamp[1]} {stamp[2]}").replace(tzinfo=UTC)
    except ValueError:
        return 0
    return int(at.timestamp()) * 10**9


def _is_topology(process: _Process, text: str) -> bool:
    """Take a line about rings, trees, transports or algorithms; return whether it was one."""
    channel, ring = _CHANNEL.match(text), _RING.match(text)
    if channel is not None:
        _count(process, "transports", re.sub(r"/\d+(?=/|$)", "", channel[1]))
    elif ring is not None:
        _count(process, "rings", f"{ring[1]}: {' '.join(ring[2].split())}")
    elif trees := _TREES.match(text):
        for part in re.findall(r"\[\d+\][^\[]*", trees[1]):
            _count(process, "trees", part.strip())
    elif graph := _GRAPH.match(text):
        _count(process, "graphs", graph[0])
    elif tuning := _TUNING.search(text):
        _count(process, "algorithms", f"{_name(tuning[2], _ALGORITHMS)}/"
                                      f"{_name(tuning[3], _PROTOCOLS)}")  # fmt: skip
    else:
        return False
    return True


def _count(process: _Process, kind: str, text: str) -> None:
    counter = process.topology.setdefault(kind, Counter())
    if text in counter or len(counter) < _MAX_PARTS:
        counter[text] += 1


def _name(text: str, names: tuple[str, ...]) -> str:
    return names[int(text)] if text.isdecimal() and int(text) < len(names) else text


def _learn(process: _Process, text: str) -> None:
    for name, pattern in _FACTS:
        if match := pattern.search(text):
            # of an interface its name should agree, its address cannot
            process.facts[name] = _ADDRESS.sub("", match[1]).strip()[:400]
    if variable := _VARIABLE.search(text):
        process.facts[f"env.{variable[1]}"] = variable[2].strip()[:400]
    if timings := _TIMINGS.search(text):
        process.init = {"seconds": timings[1], "parts": timings[2][:400]}


def _join(one: _Process, other: _Process) -> None:
    one.facts |= {name: value for name, value in other.facts.items() if name not in one.facts}
    for kind, counter in other.topology.items():
        one.topology.setdefault(kind, Counter()).update(counter)
    one.lines += other.lines
    one.num_dropped += other.num_dropped
    one.num_ranks = max(one.num_ranks, other.num_ranks)


def _add_rank(
    found: Imported, rank: int, process: _Process, known: KnownErrors, time_ns: int
) -> None:
    first = min((line.time_ns for line in process.lines), default=time_ns)
    who: dict[str, Any] = {"attempt": 0, "rank": rank, "time_ns": first}
    found.records.append(
        schema.RankRegistered(
            **who, world_size=found.world_size, local_rank=max(0, process.device),
            local_world_size=1, node_rank=-1, host=process.host[:200], pid=process.pid,
            backend="nccl", sources={"logs": "NCCL_DEBUG"},
        )
    )  # fmt: skip
    if process.facts:
        found.records.append(schema.Environment(**who, facts=process.facts))
    fields = {
        kind: "; ".join(f"{text} x{count}" if count > 1 else text
                        for text, count in counter.most_common())[:4000]
        for kind, counter in process.topology.items()
    }  # fmt: skip
    if fields:
        found.records.append(schema.Event(**who, name="nccl topology", fields=fields))
    if process.init:
        found.records.append(schema.Event(**who, name="nccl init", fields=process.init))
    if process.num_dropped:
        found.records.append(
            schema.Loss(
                **who, source="import", reason=f"more than {_MAX_LINES:,} lines of one rank",
                count=process.num_dropped,
            )
        )  # fmt: skip
    seen: set[str] = set()
    for line in process.lines:
        at = {**who, "time_ns": line.time_ns}
        found.records.append(
            schema.LogLine(**at, level=line.level, message=line.text, logger="nccl")
        )
        entry = known.recognise(line.text) if line.level == _WARNING else None
        if entry is None or entry.role == "benign" or entry.id in seen:
            continue
        seen.add(entry.id)
        # NCCL warns of nothing that begins a failure and goes on; echoes may be of a healthy end
        is_first = entry.role == "initiating"
        found.records.append(
            schema.ErrorRaised(
                **at, type="NCCL", message=line.text, where="main" if is_first else "collective"
            )
        )
