"""Which lines of a block match a text or a regular expression: one search over all of them.

The texts of a block are one run of bytes, each ended by a line feed. RE2 searches it as a whole,
so a block without a match costs no work per line; what it finds is looked at line by line.
"""

from __future__ import annotations

import importlib
import re
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from rankscope_server.search.tree import Place, QueryError, Regex, Text
from rankscope_server.search.words import IS_WORD_BYTE, is_word_at

_re2: Any = importlib.import_module("re2")  # without types
Array = np.ndarray[Any, np.dtype[Any]]
_MAX_PROGRAM_BYTES = 8 << 20  # of a regular expression: a larger one is refused
_IS_WORD_AT = np.frombuffer(IS_WORD_BYTE, bool)
# What two bytes of a word may part it: a small letter or digit and a capital, two capitals, and
# whatever may be no letter.
_KIND_AT = np.array(
    [3 if byte >= 128 else 2 if chr(byte).isupper() else 1 for byte in range(256)], np.uint8
)
_MAY_PART = np.array([[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1]], bool)
# Where these stand, what matches a line alone may not match it among others.
_ENDS_OF_TEXT = re.compile(r"\\[Az]|\(\?[a-zA-Z]*-")


class Texts(NamedTuple):
    """The texts of a block; line `n` is `data[ends[n - 1] + 1 : ends[n]]`, its line feed left out.

    `ends` are the positions of the line feeds.
    """

    data: bytes
    ends: Array

    def line(self, index: int) -> tuple[int, int]:
        """Return where a line begins and ends."""
        return (int(self.ends[index - 1]) + 1 if index else 0), int(self.ends[index])


def lines_with(leaf: Text | Regex, texts: Texts) -> Array:
    """Return a mask of the lines that match a leaf."""
    if isinstance(leaf, Regex):
        return _lines_of_regex(leaf, texts)
    return _lines_of_text(leaf, texts)


@lru_cache(256)
def compiled(leaf: Text | Regex) -> Any:
    """Return what RE2 makes of a leaf. Raises QueryError at its place."""
    options = _re2.Options()
    options.max_mem = _MAX_PROGRAM_BYTES
    options.log_errors = False
    if isinstance(leaf, Text):
        return _re2.compile("(?i)" + _re2.escape(leaf.text), options)
    flags = "(?im)" if leaf.ignores_case else "(?m)"
    try:
        return _re2.compile(flags + leaf.pattern, options)
    except _re2.error as error:
        said = error.args[0] if error.args else ""
        reason = said.decode(errors="replace") if isinstance(said, bytes) else str(said)
        raise _mistake(leaf, reason.replace(flags, "", 1)) from error


def _mistake(leaf: Regex, reason: str) -> QueryError:
    """Return what RE2 says, at the part of the expression that it names."""
    part = reason.rpartition(": ")[2]
    at = leaf.pattern.find(part)
    start = leaf.place.start + len("/") + at
    # one that was written \/ is shorter in the pattern
    is_found = part and at >= 0 and "/" not in leaf.pattern[: at + len(part)]
    return QueryError(
        f"not a regular expression of RE2: {reason[:200]}",
        Place(start, start + len(part)) if is_found else leaf.place,
        "see https://github.com/google/re2/wiki/Syntax, or search for it in quotation marks",
    )


def _lines_of_text(leaf: Text, texts: Texts) -> Array:
    if leaf.text.isascii():
        return _lines_of_ascii(leaf, texts)
    search, data = compiled(leaf).search, texts.data
    mask = np.zeros(len(texts.ends), bool)
    at = 0
    while (match := search(data, at)) is not None:
        start, end = match.span()
        index = int(np.searchsorted(texts.ends, start))
        line = texts.line(index)
        if end <= line[1] and _is_bounded(leaf, data, line, start, end):
            mask[index] = True
            at = line[1] + 1
        else:
            at = start + 1
    return mask


def _lines_of_ascii(leaf: Text, texts: Texts) -> Array:
    """Return the same, of all places at once; only those within a word are looked at alone."""
    mask = np.zeros(len(texts.ends), bool)
    needle, data = leaf.text.lower().encode(), texts.data
    lower = data.lower()
    if needle not in lower:
        return mask
    starts = _places_of(needle, np.frombuffer(lower, np.uint8))
    ends = starts + len(needle)
    lines = np.searchsorted(texts.ends, starts)
    if b"\n" in needle:
        inside = ends <= texts.ends[lines]
        starts, ends, lines = starts[inside], ends[inside], lines[inside]
    # The last byte is a line feed: so is byte -1.
    codes = np.frombuffer(data, np.uint8)
    is_bounded, may_be = np.ones(len(starts), bool), np.ones(len(starts), bool)
    for is_open, at in ((leaf.is_open_left, starts), (leaf.is_open_right, ends)):
        if not is_open:
            before, after = codes[at - 1], codes[at]
            is_hard = ~(_IS_WORD_AT[before] & _IS_WORD_AT[after])
            is_bounded &= is_hard
            may_be &= is_hard | _MAY_PART[_KIND_AT[before], _KIND_AT[after]]
    mask[lines[is_bounded]] = True
    for place in np.flatnonzero(may_be & ~mask[lines]).tolist():
        index, start, end = int(lines[place]), int(starts[place]), int(ends[place])
        if not mask[index] and _is_bounded(leaf, data, texts.line(index), start, end):
            mask[index] = True
    return mask


def _places_of(needle: bytes, data: Array) -> Array:
    """Return all places of a needle, also those that overlap."""
    size = len(data) - len(needle) + 1
    places = np.flatnonzero(data[:size] == needle[0])
    for offset, byte in enumerate(needle[1:], 1):
        places = places[data[places + offset] == byte]
    return places


def _is_bounded(leaf: Text, data: bytes, line: tuple[int, int], start: int, end: int) -> bool:
    """Return whether a match begins and ends where a word does, as far as the leaf asks for it."""
    lo, hi = line
    is_hard_left = leaf.is_open_left or start == lo or _is_gap(data, start)
    is_hard_right = leaf.is_open_right or end == hi or _is_gap(data, end)
    if is_hard_left and is_hard_right:
        return True
    first, last = start, end
    while first > lo and IS_WORD_BYTE[data[first - 1]]:
        first -= 1
    while last < hi and IS_WORD_BYTE[data[last]]:
        last += 1
    before = data[first:start].decode()
    found = data[start:end].decode()
    text = before + found + data[end:last].decode()
    is_left, is_right = is_word_at(text, len(before), len(before) + len(found))
    return (is_hard_left or is_left) and (is_hard_right or is_right)


def _is_gap(data: bytes, at: int) -> bool:
    return not (IS_WORD_BYTE[data[at - 1]] and IS_WORD_BYTE[data[at]])


def _lines_of_regex(leaf: Regex, texts: Texts) -> Array:
    search, data = compiled(leaf).search, texts.data
    mask = np.zeros(len(texts.ends), bool)
    if _ENDS_OF_TEXT.search(leaf.pattern):
        for index in range(len(mask)):
            lo, hi = texts.line(index)
            mask[index] = search(data[lo:hi]) is not None
        return mask
    at = 0
    while (match := search(data, at)) is not None:
        # A match may reach over several lines; each of them is searched alone.
        first = int(np.searchsorted(texts.ends, match.start()))
        last = int(np.searchsorted(texts.ends, max(match.end() - 1, match.start())))
        for index in range(first, min(last + 1, len(mask))):
            lo, hi = texts.line(index)
            mask[index] = search(data[lo:hi]) is not None
        if last + 1 >= len(mask):
            break
        at = int(texts.ends[last]) + 1
    return mask
