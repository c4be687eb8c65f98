"""Turns output into lines for the record: by rank, by level, blocks whole, floods counted."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from rankscope.output import blocks
from rankscope.output.log_limits import Bucket
from rankscope.wire.redaction import redact

Stream = Literal["stdout", "stderr"]
# set by a launcher that sees the ranks' output: "inherited", or "files": redirected files too
TEE_VARIABLE = "RANKSCOPE_TEE"
MAX_LINE_BYTES = 16 << 10
MAX_BLOCK_CHARACTERS = 60_000
LINES_PER_SECOND, BURST_LINES = 1000, 5000
SERIOUS_PER_SECOND, BURST_SERIOUS = 200, 1000  # of ERROR and above, when the others are used up
BLOCK_SECONDS = 0.5  # a block whose next line does not come is complete

_RANK = re.compile(r"\[rank(\d{1,9})\]:[ ]?")
_GLOG = re.compile(r"^\[?([IWEF])\d{4} \d\d:\d\d:\d\d")
_GLOG_LEVELS = {
    "I": logging.INFO, "W": logging.WARNING, "E": logging.ERROR, "F": logging.CRITICAL,
}  # fmt: skip
_WORD = re.compile(r"\b(CRITICAL|FATAL|ERROR|WARNING|WARN|INFO|DEBUG)\b|\b\w*(Warning|Error): ")
_WORD_LEVELS = {
    "CRITICAL": logging.CRITICAL, "FATAL": logging.CRITICAL, "ERROR": logging.ERROR,
    "WARNING": logging.WARNING, "WARN": logging.WARNING, "INFO": logging.INFO,
    "DEBUG": logging.DEBUG, "Warning": logging.WARNING, "Error": logging.ERROR,
}  # fmt: skip
_LEVEL_WITHIN = 120  # characters: later words belong to the message
# one of these is in every line that may be serious: a flood without them is only counted
_SERIOUS = re.compile(
    rb"rror|ERROR|FATAL|CRITICAL|Traceback|E\d{4} |F\d{4} |terminate|={20}|PRIVATE KEY"
)


@dataclass(frozen=True)
class Line:
    """One line of output, or one whole block."""

    text: str
    stream: Stream
    level: int
    time_ns: int
    rank: int | None = None
    local_rank: int | None = None
    kind: blocks.Kind | Literal["line"] = "line"


@dataclass
class _Open:
    """A block that still grows, and where it came from."""

    block: blocks.Block
    time_ns: int
    since: float


@dataclass
class _State:
    suppressed: int = 0
    partial: bytes = b""
    blocks: dict[tuple[int | None, int | None], _Open] = field(default_factory=dict)


class LineIndexer:
    """Takes the bytes of one stream. `emit` gets the lines, `on_suppressed` how many did not fit.

    Secrets are taken out of every line. Not for several threads: each stream has its own.
    """

    def __init__(
        self,
        stream: Stream,
        emit: Callable[[Line], None],
        on_suppressed: Callable[[int], None],
        roles: tuple[str, ...] = ("default",),
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._stream = stream
        self._emit = emit
        self._on_suppressed = on_suppressed
        self._role = re.compile(rf"\[(?:{'|'.join(map(re.escape, roles))})(\d{{1,9}})\]:[ ]?")
        self._clock = clock
        self._wall_ns = wall_ns
        self._state = _State()
        self._lines = Bucket(BURST_LINES, LINES_PER_SECOND, clock())
        self._serious = Bucket(BURST_SERIOUS, SERIOUS_PER_SECOND, clock())

    @property
    def has_open_block(self) -> bool:
        """Whether lines were taken in that are not emitted yet."""
        return bool(self._state.blocks)

    def feed(self, data: bytes) -> None:
        """Take in what was written."""
        state = self._state
        is_flood = b"\n" in data and not self._lines.has(self._clock())
        if is_flood and not state.blocks and not _SERIOUS.search(state.partial + data):
            state.suppressed += data.count(b"\n")  # do not even decode
            state.partial = data[data.rfind(b"\n") + 1 :][:MAX_LINE_BYTES]
            return
        *lines, rest = (state.partial + data).split(b"\n")
        state.partial = b""
        for line in lines:
            self._take(line)
        if b"\r" in rest:  # of a progress bar that continues only the latest drawing is kept
            rest = rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :]
        while len(rest) > MAX_LINE_BYTES:
            self._take(rest[:MAX_LINE_BYTES])
            rest = rest[MAX_LINE_BYTES:]
        state.partial = rest

    def tick(self) -> None:
        """Complete blocks whose next line does not come, and report what was suppressed."""
        now = self._clock()
        for key, open_block in list(self._state.blocks.items()):
            if now - open_block.since > BLOCK_SECONDS:
                self._finish(key)
        self._report()

    def flush(self) -> None:
        """Complete every block now."""
        for key in list(self._state.blocks):
            self._finish(key)
        self._report()

    def close(self) -> None:
        """Take the last line, even without its end, and complete everything."""
        if self._state.partial:
            partial, self._state.partial = self._state.partial, b""
            self._take(partial)
        self.flush()

    def _report(self) -> None:
        if self._state.suppressed:
            self._on_suppressed(self._state.suppressed)
            self._state.suppressed = 0

    def _take(self, raw: bytes) -> None:
        # a progress bar redraws its line: what stays on the screen is the last drawing
        text = raw.rstrip(b"\r").rpartition(b"\r")[2][:MAX_LINE_BYTES].decode(errors="replace")
        rank, local_rank, text = self._place(text)
        key = (rank, local_rank)
        open_block = self._state.blocks.get(key)
        if open_block is not None:
            if open_block.block.take(text):
                open_block.since = self._clock()
                if open_block.block.is_complete:
                    self._finish(key)
                return
            self._finish(key)
        block = blocks.begin(text)
        level = logging.ERROR if block is not None else level_of(text)
        if not text.strip():
            return
        if not self._admit(level):
            self._state.suppressed += 1
        elif block is not None:
            self._state.blocks[key] = _Open(block, self._wall_ns(), self._clock())
        else:
            text = redact(text)
            self._emit(Line(text, self._stream, level, self._wall_ns(), rank, local_rank))

    def _admit(self, level: int) -> bool:
        now = self._clock()
        return self._lines.take(now) or (level >= logging.ERROR and self._serious.take(now))

    def _finish(self, key: tuple[int | None, int | None]) -> None:
        open_block = self._state.blocks.pop(key)
        block = open_block.block
        text = redact("\n".join(block.lines).rstrip())
        if len(text) > MAX_BLOCK_CHARACTERS:
            half = MAX_BLOCK_CHARACTERS // 2
            text = f"{text[:half]}\n[... {len(text) - 2 * half} characters cut ...]\n{text[-half:]}"
        is_other = block.kind == "key" or (block.kind == "summary" and len(block.lines) == 1)
        level = level_of(block.lines[0]) if is_other else logging.ERROR
        self._emit(Line(text, self._stream, level, open_block.time_ns, *key, block.kind))

    def _place(self, text: str) -> tuple[int | None, int | None, str]:
        """Take the prefixes off a line that say whose it is."""
        local_rank = rank = None
        if match := self._role.match(text):
            local_rank, text = int(match.group(1)), text[match.end() :]
        if match := _RANK.match(text):
            rank, text = int(match.group(1)), text[match.end() :]
        return rank, local_rank, text


def level_of(text: str) -> int:
    """Return the logging level that a line claims, INFO where it claims none."""
    if match := _GLOG.match(text):
        return _GLOG_LEVELS[match.group(1)]
    if match := _WORD.search(text[:_LEVEL_WITHIN]):
        return _WORD_LEVELS[match.group(1) or match.group(2)]
    return logging.INFO
