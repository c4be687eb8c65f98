"""Log lines that may say why a rank died: known errors, or errors at least.

A line alone is never a failure: scripts log "connection reset, trying again". It only says what
the end of a rank meant. So one row per meaning is kept, with the first and the newest time of each
rank, in memory that does not grow with the logs. Launchers pass on what ranks print and no hook
sees; which rank printed it is not known.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from rankscope.wire.schema import LogLine
from rankscope_server.known_errors.entry import KnownError
from rankscope_server.known_errors.load import known_errors, order
from rankscope_server.known_errors.templates import template
from rankscope_server.observe.last_lines import LastLines

_MAX_UNKNOWN = 256  # templates that no entry knows; those said last are kept
_MAX_CELLS = 100_000  # of rows and ranks: some 20 MB
_MAX_TEXT = 2_000
LAUNCHER = -1  # in place of a rank
# What a line at a lower level must hold to be looked up: libraries print faults as plain output.
_SIGNS = (
    "error", "warn", "fail", "fatal", "abort", "kill", "oom", "out of memory", "watchdog",
    "timed out", "timeout", "denied", "refused", "no space", "exception", "terminate", "segfault",
    "corrupt",
)  # fmt: skip


@dataclass(slots=True)
class Row:
    """Lines that mean the same. `said` is by rank (first, newest) time, ns of its host."""

    key: str
    text: str
    entry: KnownError | None
    first: tuple[int, int, str]  # time, rank and text of the first, whatever came first
    said: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def newest_ns(self) -> int:
        """Return when such a line was said last."""
        return max(newest for _, newest in self.said.values())


class LineTable:
    """Rows by meaning; `take` any line, in any order, also twice."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.last = LastLines()
        self._cells = 0
        self._num_unknown = 0

    def take(self, line: LogLine) -> None:
        """Take a line if it may report a fault."""
        self.last.take(line)
        key = key_of(line.level, line.message)
        if key is None:
            return
        text = line.message[:_MAX_TEXT]
        first = (line.time_ns, line.rank, text)
        row = self.rows.get(key)
        if row is None:
            row = Row(key, text, recognise_line(text), first)
            if self._cells < _MAX_CELLS:
                self.rows[key] = row
                self._num_unknown += row.entry is None
        elif first < row.first:
            row.first, row.text = first, text
        known = row.said.get(line.rank)
        if known is not None:
            row.said[line.rank] = min(known[0], line.time_ns), max(known[1], line.time_ns)
        elif self._cells < _MAX_CELLS:
            row.said[line.rank] = line.time_ns, line.time_ns
            self._cells += 1
        if self._num_unknown > _MAX_UNKNOWN:
            self._forget()

    def near(self, rank: int, time_ns: int, before_ns: int, after_ns: int) -> Iterator[Row]:
        """Yield what a rank said around a moment."""
        for row in self.rows.values():
            first, newest = row.said.get(rank, (0, 0))
            if any(time_ns - before_ns <= one <= time_ns + after_ns for one in (first, newest)):
                yield row

    def _forget(self) -> None:
        unknown = (row for row in self.rows.values() if row.entry is None)
        oldest = min(unknown, key=lambda row: (row.newest_ns, row.key))
        del self.rows[oldest.key]
        self._cells -= len(oldest.said)
        self._num_unknown -= 1


def key_of(level: int, message: str) -> str | None:
    """Return what a line means, as one text; None for a line that reports nothing."""
    text = message[:_MAX_TEXT]
    if level < logging.WARNING:
        lowered = text.lower()
        if not any(sign in lowered for sign in _SIGNS):
            return None
    entry = recognise_line(text)
    if entry is not None:
        return entry.id if entry.role not in ("benign", "note") else None
    return f"? {template(text)}" if level >= logging.ERROR else None


@functools.lru_cache(4 * _MAX_UNKNOWN)  # many ranks say the same
def recognise_line(text: str) -> KnownError | None:
    """Return the entry that knows a line, or the line of a block that says most."""
    found = [
        one for line in text.splitlines() if (one := known_errors().recognise(line)) is not None
    ]
    return min(found, key=order) if found else None
