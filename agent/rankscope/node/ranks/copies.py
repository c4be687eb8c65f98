"""Lines of output that repeat what was logged or warned of: handlers print each record.

The record is the better one: it has a rank, a level, a logger and fields. A printed line ends with
the record's message, as formatters write it. It is left out once for each record and each handler,
which its form shows, in the output of the rank and in what the launcher passed on from all of
them. Python prints the line of the script below a warning.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from rankscope.wire import schema

_MOST_KNOWN = 8192  # messages that were logged last
_TAIL = 16  # characters by which a message is looked up
_MOST_KEPT = 500  # characters of a text that is kept as it is: 16 MB of the widest messages
_SHORTEST = 4  # characters of a message that is looked for
_PART_OF_A_WORD = "_-./"
_MOST_FORMS = 3  # of one message: more handlers than that have few
_MOST_LINES = 20  # of a record that are looked for one by one
_SOURCE_NS = 1_000_000_000  # for so long after a warning its line of source may come
_DIGITS = re.compile(r"\d+")
_PLACE = re.compile(r"\s{2,}\S+:\d+$")  # where rich shows the file of a record
_TAG = b"\xa3log"  # of a LogLine, in the first bytes of the map that msgpack makes of it
_ERROR_TAG = b"\xa5error"
_TAG_WITHIN = 16
_LEFT = ("main", "thread", "training")  # exceptions that Python prints by itself
_LEVELS = frozenset(logging.getLevelNamesMapping())
_PRINTED, _RECORDED = ("stdout", "stderr"), ("logging", "warning")
_IS_WARNING = re.compile(r"^\S+:\d+: \w+: ")  # a place, and the category


class _Message(NamedTuple):
    """One that was logged: how it ends, how long it is, and what it is known by."""

    tail: str
    length: int
    key: str


class WithoutCopies:
    """Passes records on, but no line that only repeats a logged one."""

    def __init__(self, forward: Callable[[bytes], None]) -> None:
        self._forward = forward
        self._newest: deque[_Message] = deque()
        # key of a message -> how often it was logged, by rank and for the node as a whole
        self._logged: dict[str, Counter[int]] = {}
        # key of a message -> how many copies of each form were left out, of each rank
        self._used: dict[str, Counter[tuple[int, str]]] = {}
        self._sources: dict[int, list[int]] = {}  # rank -> times of warnings, their source to come
        self._times: Counter[str] = Counter()  # in `_newest`
        # tail -> how many messages of each length end so: of one length one alone fits a line
        self._lengths: dict[str, Counter[int]] = {}

    def __call__(self, raw: bytes) -> None:
        """Take one record as it is in a journal."""
        if _TAG in raw[:_TAG_WITHIN]:
            try:
                record = schema.decode_record(raw)
            except (msgspec.MsgspecError, ValueError):
                record = None  # damaged: the server says so
            if isinstance(record, schema.LogLine) and self._is_copy(record):
                return
        elif _ERROR_TAG in raw[:_TAG_WITHIN]:
            self._remember_error(raw)
        self._forward(raw)

    def _remember_error(self, raw: bytes) -> None:
        """Take an exception: Python prints its traceback too, as it leaves."""
        try:
            error = schema.decode_record(raw)
        except (msgspec.MsgspecError, ValueError):
            return
        if isinstance(error, schema.ErrorRaised) and error.where in _LEFT:
            text = error.traceback.rstrip()
            if len(text) >= _SHORTEST:
                self._remember(error.rank, text)

    def _is_copy(self, line: schema.LogLine) -> bool:
        text = line.message.rstrip()
        if line.stream in _RECORDED:
            first, _, rest = text.partition("\n")
            parts = [first, rest]  # a traceback is printed as a block of its own
            if rest and "Traceback" not in rest:
                parts = [first, *rest.split("\n")[:_MOST_LINES]]
            for part in parts:
                if len(part) >= _SHORTEST:
                    self._remember(line.rank, part)
        elif line.stream in _PRINTED:
            return self._is_source(line) or self._leave_out(line, text)
        return False

    def _is_source(self, line: schema.LogLine) -> bool:
        """Return whether this is the line of the script that Python prints below a warning."""
        waiting = self._sources.get(line.rank)
        if not waiting:
            return False
        waiting[:] = [at_ns for at_ns in waiting if line.time_ns - at_ns < _SOURCE_NS]
        if waiting and line.message.startswith("  "):
            waiting.pop(0)
            return True
        return False

    def _remember(self, rank: int, text: str) -> None:
        message = _Message(text[-_TAIL:], len(text), _key_of(text))
        self._newest.append(message)
        self._times[message.key] += 1
        self._logged.setdefault(message.key, Counter()).update({rank, schema.NODE_RANK})
        self._lengths.setdefault(message.tail, Counter())[message.length] += 1
        if len(self._newest) > _MOST_KNOWN:
            self._forget(self._newest.popleft())

    def _forget(self, message: _Message) -> None:
        lengths = self._lengths[message.tail]
        lengths[message.length] -= 1
        if not lengths[message.length]:
            del lengths[message.length]
        if not lengths:
            del self._lengths[message.tail]
        self._times[message.key] -= 1
        if not self._times[message.key]:
            del self._times[message.key], self._logged[message.key]
            self._used.pop(message.key, None)

    def _leave_out(self, line: schema.LogLine, text: str) -> bool:
        """Return whether a line is a copy of a logged message that was not left out yet."""
        for printed in dict.fromkeys((text, _PLACE.sub("", text))):
            if any(self._may_go(line.rank, *parts) for parts in self._known_ends(printed)):
                if _IS_WARNING.search(printed):
                    self._sources.setdefault(line.rank, []).append(line.time_ns)
                return True
        return False

    def _known_ends(self, printed: str) -> Iterator[tuple[str, str]]:
        """Yield what a line has before each known message that it ends with, and its key."""
        for tail_length in range(min(_TAIL, len(printed)), _SHORTEST - 1, -1):
            for length in self._lengths.get(printed[-tail_length:], ()):
                if length <= len(printed) and _may_precede(printed[:-length], length):
                    key = _key_of(printed[-length:])
                    if key in self._logged:
                        yield printed[:-length], key

    def _may_go(self, rank: int, before: str, message: str) -> bool:
        """Return whether one more copy of this form is a handler's, and count it."""
        used = self._used.setdefault(message, Counter())
        key = (rank, _key_of(_DIGITS.sub("0", before)))
        forms = sum(of == rank for of, _ in used)
        is_another = used[key] == 0 and forms >= _MOST_FORMS
        if is_another or used[key] >= self._logged[message][rank]:
            return False
        used[key] += 1
        return True


def _key_of(text: str) -> str:
    """Return a text as it is, of a long one its length and a hash."""
    if len(text) <= _MOST_KEPT:
        return text
    digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=16).hexdigest()
    return f"{len(text)} {digest}"


def _may_precede(before: str, length: int) -> bool:
    """Return whether a formatter may have written this before a message of so many characters.

    A short message may end a sentence of the script's own: there only a level or a mark, as in
    `INFO` or `]`, can stand before it.
    """
    if not before or length >= _TAIL:
        return not before or not (before[-1].isalnum() or before[-1] in _PART_OF_A_WORD)
    words = before.split()
    return not words or not words[-1][-1].isalnum() or words[-1] in _LEVELS
