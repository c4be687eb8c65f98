"""What is to be read: files, compressed files, folders of them, standard input."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rankscope.wire import zstd
from rankscope_server.importers.counted import Counted

CHUNK_BYTES = 4 << 20
_HEAD_BYTES = 4096
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_MAX_FILES = 20_000
STDIN = "-"
_DUMP_WORDS = (b'"pg_config"', b'"pg_status"', b'"collective_seq_id"')  # entries may come first


class InputError(Exception):
    """An input cannot be read; the text says what to do."""


@dataclass(frozen=True)
class LogSource:
    """One log to read. `size_bytes` is that on the disk, 0 where it is not known."""

    name: str
    path: Path | None  # None: standard input
    size_bytes: int = 0


@dataclass(frozen=True)
class Skipped:
    """A file that was found in a folder and not read, and why."""

    name: str
    reason: str


@dataclass
class Inputs:
    """What was named: logs, recordings of other tools, and what is neither."""

    sources: list[LogSource] = field(default_factory=list)
    recordings: list[Path] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def add(self, path: Path) -> str:
        """Take a file in; return why it is neither a log nor a recording, empty where it is one."""
        reason = _no_log(path)
        if reason and _is_recording(path):
            self.recordings.append(path)
        elif reason:
            return reason
        else:
            self.sources.append(LogSource(str(path), path, path.stat().st_size))
        return ""


def find_sources(paths: Sequence[str]) -> Inputs:
    """Return what to read, in order of names. Raises `InputError`."""
    inputs = Inputs()
    for text in paths:
        path = Path(text)
        if text == STDIN:
            inputs.sources.append(LogSource(STDIN, None))
        elif path.is_dir():
            _of_folder(path, inputs)
        elif not path.exists():
            raise InputError(f"{text}: no such file; give log files, folders of logs, or -")
        elif reason := inputs.add(path):
            raise InputError(f"{text}: {reason}; give the text that the ranks wrote")
    inputs.sources = list({source.name: source for source in inputs.sources}.values())
    inputs.recordings = list(dict.fromkeys(inputs.recordings))
    if not inputs.sources and not inputs.recordings:
        skipped = inputs.skipped
        found = f"{len(skipped)} files, none of them a log" if skipped else "no files"
        raise InputError(f"{', '.join(paths)}: holds {found}; give the text that the ranks wrote")
    return inputs


def _of_folder(folder: Path, inputs: Inputs) -> None:
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        if len(inputs.sources) + len(inputs.recordings) >= _MAX_FILES:
            raise InputError(
                f"{folder}: more than {_MAX_FILES:,} files; give the folder of one run"
            )
        if reason := inputs.add(path):
            inputs.skipped.append(Skipped(str(path), reason))


def _is_recording(path: Path) -> bool:
    from rankscope_server.importers.recordings import format_of  # only where one may be there

    return format_of(path) is not None


def _no_log(path: Path) -> str:
    """Return why a file is no log, empty where it may be one."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; check its owner") from error
    if not head:
        return ""
    if head.startswith(_GZIP):
        head = _unpacked(head)
    if head.startswith(_ZSTD):
        return ""
    if b"\0" in head or head.startswith((b"\x80\x02", b"\x80\x04", b"\x80\x05")):
        return "is no text but binary data"
    if b'"traceEvents"' in head or b'"schemaVersion"' in head[:200]:
        return "is a profiler trace, not a log"
    if head.lstrip().startswith(b"{") and any(word in head for word in _DUMP_WORDS):
        return "is a Flight Recorder dump, not a log"
    return ""


def _unpacked(head: bytes) -> bytes:
    """Return the beginning of what is packed; empty where it is damaged."""
    try:
        return zlib.decompressobj(wbits=31).decompress(head, _HEAD_BYTES)
    except zlib.error:
        return b""


def read_source(source: LogSource, on_bytes: Callable[[int], None]) -> Iterator[bytes]:
    """Return the text of a source in chunks. `on_bytes` gets what was read from the disk."""
    if source.path is None:
        yield from _chunks(Counted(sys.stdin.buffer, on_bytes))
        return
    try:
        with source.path.open("rb") as file:
            yield from _chunks(Counted(file, on_bytes))
    except OSError as error:
        raise InputError(f"{source.name}: cannot be read: {error.strerror}") from error


def _chunks(raw: Counted) -> Iterator[bytes]:
    file = io.BufferedReader(raw, CHUNK_BYTES)
    head = file.peek(4)[:4]
    stream: Any = file
    if head.startswith(_GZIP):
        stream = gzip.GzipFile(fileobj=file)
    elif head.startswith(_ZSTD):
        stream = zstd.open_stream(file)
    gathered = bytearray()
    try:
        while part := stream.read1(CHUNK_BYTES):  # what there is, so that an error loses nothing
            gathered += part
            if len(gathered) >= CHUNK_BYTES:
                yield bytes(gathered)
                gathered.clear()
    except (EOFError, zlib.error, gzip.BadGzipFile, zstd.ZstdError):
        pass  # cut short, as of a job that was killed: what came before is read
    if gathered:
        yield bytes(gathered)
