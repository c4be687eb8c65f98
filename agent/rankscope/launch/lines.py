"""Turns the output of a launched command into log records: by rank, by level, tracebacks whole."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Stream = Literal["stdout", "stderr"]
MAX_LINE_BYTES = 16 << 10
MAX_BLOCK_LINES = 400
MAX_BLOCK_CHARACTERS = 60_000
LINES_PER_SECOND, BURST_LINES = 1000, 5000
BLOCK_SECONDS = 0.5  # a traceback whose next line does not come is complete

_RANK = re.compile(r"\[rank(\d{1,9})\]:[ ]?")
_TRACEBACK = re.compile(r"^\s*(\+ |\| )*(Exception Group )?Traceback \(most recent call last\):")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_GLOG = re.compile(r"^([IWEF])\d{4} \d\d:\d\d:\d\d")
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


@dataclass(frozen=True)
class Line:
    """One line of output, or one whole traceback."""

    text: str
    stream: Stream
    level: int
    time_ns: int
    rank: int | None = None
    local_rank: int | None = None


@dataclass
class _Block:
    """A traceback that still grows. `closing`: its exception line was seen."""

    lines: list[str]
    stream: Stream
    time_ns: int
    rank: int | None
    local_rank: int | None
    since: float
    closing: bool = False


@dataclass
class _Budget:
    tokens: float = BURST_LINES
    refilled: float = 0.0
    suppressed: int = 0
    partial: bytes = b""
    blocks: dict[tuple[int | None, int | None], _Block] = field(default_factory=dict)


class LineIndexer:
    """Takes the bytes of one stream. `emit` gets the lines, `on_suppressed` how many did not fit.

    Not for several threads: each stream has its own.
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
        self._budget = _Budget(refilled=clock())

    def feed(self, data: bytes) -> None:
        """Take in what the command wrote."""
        self._refill()
        budget = self._budget
        if budget.tokens < 1 and b"\n" in data:  # too much: count, do not even decode
            budget.suppressed += data.count(b"\n")
            budget.partial = data[data.rfind(b"\n") + 1 :][:MAX_LINE_BYTES]
            return
        *lines, rest = (budget.partial + data).split(b"\n")
        for line in lines:
            self._take(line)
        while len(rest) > MAX_LINE_BYTES:
            self._take(rest[:MAX_LINE_BYTES])
            rest = rest[MAX_LINE_BYTES:]
        budget.partial = rest

    def tick(self) -> None:
        """Complete tracebacks whose next line does not come, and report what was suppressed."""
        now = self._clock()
        for key, block in list(self._budget.blocks.items()):
            if now - block.since > BLOCK_SECONDS:
                self._finish(key)
        if self._budget.suppressed:
            self._on_suppressed(self._budget.suppressed)
            self._budget.suppressed = 0

    def close(self) -> None:
        """Take the last line, even without its end, and complete everything."""
        if self._budget.partial:
            self._take(self._budget.partial)
            self._budget.partial = b""
        for key in list(self._budget.blocks):
            self._finish(key)
        self.tick()

    def _refill(self) -> None:
        now = self._clock()
        budget = self._budget
        gained = (now - budget.refilled) * LINES_PER_SECOND
        budget.tokens, budget.refilled = min(BURST_LINES, budget.tokens + gained), now

    def _take(self, raw: bytes) -> None:
        # a progress bar redraws its line: what stays on the screen is the last drawing
        text = raw.rstrip(b"\r").rpartition(b"\r")[2][:MAX_LINE_BYTES].decode(errors="replace")
        if self._budget.tokens < 1:
            self._budget.suppressed += 1
            return
        self._budget.tokens -= 1
        rank, local_rank, text = self._place(text)
        key = (rank, local_rank)
        block = self._budget.blocks.get(key)
        if block is not None and self._continues(block, text):
            block.lines.append(text)
            block.since = self._clock()
            if len(block.lines) >= MAX_BLOCK_LINES:
                self._finish(key)
            return
        if block is not None:
            self._finish(key)
        if _TRACEBACK.match(text):
            self._budget.blocks[key] = _Block(
                [text], self._stream, self._wall_ns(), rank, local_rank, self._clock()
            )
        elif text.strip():
            self._emit(Line(text, self._stream, level_of(text), self._wall_ns(), rank, local_rank))

    @staticmethod
    def _continues(block: _Block, text: str) -> bool:
        """Return whether a line belongs to a traceback that is open."""
        if block.closing:
            chained = not text.strip() or text.startswith(_CHAINED) or _TRACEBACK.match(text)
            if text.startswith(_CHAINED) or _TRACEBACK.match(text):
                block.closing = False
            return bool(chained)
        if text[:1].isspace() or not text or text.startswith((*_CHAINED, "Traceback ")):
            return True
        block.closing = True  # the exception itself, at the margin
        return True

    def _finish(self, key: tuple[int | None, int | None]) -> None:
        block = self._budget.blocks.pop(key)
        text = "\n".join(block.lines).rstrip()
        if len(text) > MAX_BLOCK_CHARACTERS:
            half = MAX_BLOCK_CHARACTERS // 2
            text = f"{text[:half]}\n[... {len(text) - 2 * half} characters cut ...]\n{text[-half:]}"
        self._emit(
            Line(text, block.stream, logging.ERROR, block.time_ns, block.rank, block.local_rank)
        )

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
