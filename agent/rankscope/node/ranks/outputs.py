"""What a rank wrote to stdout and stderr: frames of its journal, and files that it named."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rankscope.files.journal import OUTPUT_HEAD, STREAMS
from rankscope.files.run_directory import OUTPUTS, is_of_each_process
from rankscope.output.line_records import LineRecords
from rankscope.output.lines import Line, LineIndexer
from rankscope.wire import schema

Forward = Callable[[bytes], None]
Report = Callable[[str, dict[str, str]], None]  # name and fields of an event
MAX_READ = 256 << 10  # bytes of one file per turn
_MAX_FILES = 8
_MAX_OUTPUTS_BYTES = 64 << 10
_MAX_ERROR_FILE = 1 << 20


class _File(msgspec.Struct):
    stream: str
    path: str
    offset: int = 0
    is_shared: bool = False
    logger: str = ""


class _Outputs(msgspec.Struct):
    files: list[_File] = []
    error_file: str = ""


class _ElasticMessage(msgspec.Struct):
    message: str = ""
    extraInfo: dict[str, str] = {}


class _ElasticError(msgspec.Struct):
    message: _ElasticMessage | str = ""


@dataclass
class _Tail:
    """One followed file. It stays open: a rank writes on in one that is renamed or deleted."""

    path: Path
    offset: int  # read up to here, whole lines
    safe: int  # everything before is emitted
    indexer: LineIndexer
    descriptor: int = -1
    upto: int | None = None  # its size before the journal was read: a record comes before its print
    is_left: bool = False  # what is there is no file
    has_moved: bool = False


class NotAFileError(OSError):
    """What is there is no regular file, and could make a reader wait for ever."""


class RankOutput:
    """The lines of one rank. `owner` (attempt, rank) is the rank they belong to.

    `report` hears once of a file that cannot be followed, or was moved.
    """

    def __init__(
        self, directory: Path, owner: tuple[int, int], offsets: dict[str, int],
        on_loss: Callable[[str, int], None], report: Report = lambda name, fields: None,
    ) -> None:  # fmt: skip
        self._directory = directory
        self._attempt, self._rank = owner
        self._offsets = offsets
        self._on_loss = on_loss
        self._report = report
        self._forward: Forward = lambda record: None
        self._records = LineRecords()
        self._frame_time_ns = self._frame_step = 0
        self._frames: dict[int, LineIndexer] = {}
        self._tails: list[_Tail] | None = None
        self._error_file = ""

    def frame(self, body: bytes) -> None:
        """Take in what Python code wrote; a damaged frame is ignored."""
        if len(body) < OUTPUT_HEAD.size:
            return
        time_ns, step, stream = OUTPUT_HEAD.unpack_from(body)
        if stream >= len(STREAMS):
            return
        self._frame_time_ns, self._frame_step = min(time_ns, time.time_ns()), step
        if stream not in self._frames:
            self._frames[stream] = LineIndexer(
                STREAMS[stream], self._emit_frame, self._suppressed,
                wall_ns=lambda: self._frame_time_ns,
            )  # fmt: skip
        self._frames[stream].feed(body[OUTPUT_HEAD.size :] + b"\n")

    def turn(self, forward: Forward, *, gone: bool) -> bool:
        """Read on in the files; return whether there is more to read now.

        Blocks out of frames are completed here: the journal's offset moves on with the turn.
        """
        self._forward = forward
        for indexer in self._frames.values():
            indexer.flush()
        more = False
        for tail in self._find_tails():
            more |= self._read(tail, gone=gone)
            tail.indexer.tick()
            if not tail.indexer.has_open_block:
                tail.safe = tail.offset
        return more

    def begin(self, forward: Forward) -> None:
        """Say where lines go that the next frames make; to be called before those are read."""
        self._forward = forward
        for tail in self._find_tails():
            tail.upto = os.fstat(tail.descriptor).st_size if self._is_open(tail) else 0

    def close(self) -> None:
        """Close the files."""
        for tail in self._tails or ():
            if tail.descriptor >= 0:
                os.close(tail.descriptor)
                tail.descriptor = -1

    def save(self) -> dict[str, int]:
        """Return how far each file is read."""
        if self._tails is None:
            return dict(self._offsets)
        return {str(tail.path): tail.safe for tail in self._tails}

    def error(self, step: int) -> schema.ErrorRaised | None:
        """Return what torchrun's error file says of this rank's end."""
        if not self._error_file:
            return None
        try:
            with open(open_file(Path(self._error_file)), "rb") as file:
                failure = msgspec.json.decode(file.read(_MAX_ERROR_FILE), type=_ElasticError)
        except (OSError, msgspec.MsgspecError, ValueError):
            return None
        message = failure.message if isinstance(failure.message, str) else failure.message.message
        extra = {} if isinstance(failure.message, str) else failure.message.extraInfo
        kind, _, text = message.partition(": ")
        return schema.ErrorRaised(
            attempt=self._attempt, rank=self._rank, time_ns=time.time_ns(), type=kind[:200],
            message=text or message, traceback=extra.get("py_callstack", ""), step=step,
        )  # fmt: skip

    # --- inside --------------------------------------------------------------------------

    def _find_tails(self) -> list[_Tail]:
        if self._tails is None:
            try:
                with (self._directory / OUTPUTS).open("rb") as file:
                    text = file.read(_MAX_OUTPUTS_BYTES)
                outputs = msgspec.json.decode(text, type=_Outputs)
            except (OSError, msgspec.MsgspecError, ValueError):
                return []  # not there yet, or half written
            self._error_file = outputs.error_file
            self._tails = [self._open(file) for file in outputs.files[:_MAX_FILES]]
        return self._tails

    def _open(self, file: _File) -> _Tail:
        rank = schema.NODE_RANK if file.is_shared else self._rank

        def emit(line: Line) -> None:
            self._send(line, rank if line.rank is None else line.rank, file.logger)

        stream = "stderr" if file.stream == "stderr" else "stdout"
        offset = self._offsets.get(file.path, max(file.offset, 0))
        indexer = LineIndexer(stream, emit, self._suppressed)  # type: ignore[arg-type]
        return _Tail(Path(file.path), offset, offset, indexer)

    def _read(self, tail: _Tail, *, gone: bool) -> bool:
        """Take in whole lines; the rest waits in the file until its end comes or the rank's."""
        if not self._is_open(tail):
            return False
        try:
            if os.fstat(tail.descriptor).st_size < tail.offset:  # the script began the file anew
                tail.offset = tail.safe = 0
            limit = MAX_READ if gone or tail.upto is None else max(0, tail.upto - tail.offset)
            data = os.pread(tail.descriptor, min(limit, MAX_READ), tail.offset)
        except OSError:
            return False
        is_full = len(data) == MAX_READ
        is_last = gone and not is_full
        if not is_last and not (is_full and b"\n" not in data):
            data = data[: data.rfind(b"\n") + 1]
        for line in data.splitlines(keepends=True) if data else ():
            tail.indexer.feed(line)
            tail.offset += len(line)
            if not tail.indexer.has_open_block:
                tail.safe = tail.offset
        if is_last:
            tail.indexer.close()
        return is_full

    def _is_open(self, tail: _Tail) -> bool:
        """Return whether a file can be read; opens it once it is there."""
        if tail.descriptor < 0 and not tail.is_left:
            try:
                tail.descriptor = open_file(tail.path)
            except NotAFileError as error:
                tail.is_left = True
                self._report("output not followed", {"file": str(tail.path), "reason": str(error)})
            except OSError:
                return False  # not there yet
        if tail.descriptor >= 0 and not tail.has_moved and not _is_at(tail.path, tail.descriptor):
            tail.has_moved = True
            reason = "renamed or deleted; it is read for as long as its rank writes"
            self._report("output file moved", {"file": str(tail.path), "reason": reason})
        return tail.descriptor >= 0

    def _emit_frame(self, line: Line) -> None:
        self._send(line, self._rank, "", self._frame_step)

    def _send(self, line: Line, rank: int, logger: str, step: int = 0) -> None:
        for record in self._records.of(line, self._attempt, rank, logger=logger, step=step):
            self._forward(schema.encode(record))

    def _suppressed(self, count: int) -> None:
        self._on_loss("too many lines at once", count)


def open_file(path: Path) -> int:
    """Return a descriptor of a regular file. Raises NotAFileError for all else, OSError."""
    if is_of_each_process(str(path)):
        raise NotAFileError("it is another file in each process")
    is_file = stat.S_ISREG(path.stat().st_mode)  # some devices do something when they are opened
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC) if is_file else -1
    if is_file and stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    if is_file:
        os.close(descriptor)
    raise NotAFileError("it is a pipe, a device or a directory")


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False
