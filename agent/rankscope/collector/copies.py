"""Lines of output that repeat what was logged: handlers print each record of the logging module.

The record is the better one: it has a rank, a level, a logger and fields. A printed line ends with
the record's message, as formatters write it; it is left out once for each record, in the output of
the rank and in what the launcher passed on from all of them.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable

import msgspec

from rankscope import schema

_MOST_KNOWN = 8192  # messages that were logged last
_TAIL = 16  # characters by which a message is looked up
_SHORTEST = 4  # characters of a message that is looked for
_PART_OF_A_WORD = "_-./"
_TAG = b"\xa3log"  # of a LogLine, in the first bytes of the map that msgpack makes of it
_TAG_WITHIN = 16
_LEVELS = frozenset(logging.getLevelNamesMapping())
_PRINTED = ("stdout", "stderr")


class WithoutCopies:
    """Passes records on, but no line that only repeats a logged one."""

    def __init__(self, forward: Callable[[bytes], None]) -> None:
        self._forward = forward
        self._newest: deque[str] = deque()
        # message -> how often a copy may be left out yet, by rank and for the node as a whole
        self._left: dict[str, Counter[int]] = {}
        self._times: Counter[str] = Counter()  # in `_newest`
        self._by_tail: dict[str, set[str]] = {}

    def __call__(self, raw: bytes) -> None:
        """Take one record as it stands in a journal."""
        if _TAG in raw[:_TAG_WITHIN]:
            try:
                record = schema.decode_record(raw)
            except (msgspec.MsgspecError, ValueError):
                record = None  # damaged: the server says so
            if isinstance(record, schema.LogLine) and self._is_copy(record):
                return
        self._forward(raw)

    def _is_copy(self, line: schema.LogLine) -> bool:
        text = line.message.rstrip()
        if line.stream == "logging":
            first, _, rest = text.partition("\n")
            for part in (first, rest):  # a traceback is printed as a block of its own
                if len(part) >= _SHORTEST:
                    self._remember(line.rank, part)
        elif line.stream in _PRINTED:
            return self._leave_out(line.rank, text)
        return False

    def _remember(self, rank: int, message: str) -> None:
        self._newest.append(message)
        self._times[message] += 1
        self._left.setdefault(message, Counter()).update({rank, schema.NODE_RANK})
        self._by_tail.setdefault(message[-_TAIL:], set()).add(message)
        if len(self._newest) > _MOST_KNOWN:
            self._forget(self._newest.popleft())

    def _forget(self, message: str) -> None:
        self._times[message] -= 1
        if self._times[message]:
            return
        del self._times[message], self._left[message]
        alike = self._by_tail[message[-_TAIL:]]
        alike.discard(message)
        if not alike:
            del self._by_tail[message[-_TAIL:]]

    def _leave_out(self, rank: int, printed: str) -> bool:
        """Return whether a line is a copy of a logged message that was not left out yet."""
        for length in range(min(_TAIL, len(printed)), _SHORTEST - 1, -1):
            for message in self._by_tail.get(printed[-length:], ()):
                if self._left[message][rank] > 0 and _ends_with(printed, message):
                    self._left[message][rank] -= 1
                    return True
        return False


def _ends_with(printed: str, message: str) -> bool:
    """Return whether a line is a message, or ends with it behind what a formatter may write.

    A short message may end a sentence of the script's own: there only a level or a mark, as in
    `INFO` or `]`, can stand before it.
    """
    if not printed.endswith(message):
        return False
    before = printed[: -len(message)]
    if not before or len(message) >= _TAIL:
        return not before or not (before[-1].isalnum() or before[-1] in _PART_OF_A_WORD)
    words = before.split()
    return not words or not words[-1][-1].isalnum() or words[-1] in _LEVELS
