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

from rankscope_server.search.tree import QueryError, Regex, Text
from rankscope_server.search.words import is_word_at

_re2: Any = importlib.import_module("re2")  # without types
Array = np.ndarray[Any, np.dtype[Any]]
_MAX_PROGRAM_BYTES = 8 << 20  # of a regular expression: a larger one is refused
# Bytes that may be of a word; of those from 128 on the whole character decides.
_IS_WORD = bytes(byte >= 128 or chr(byte).isalnum() for byte in range(256))
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
        raise QueryError(
            f"not a regular expression of RE2: {reason[:200]}",
            leaf.place,
            "see https://github.com/google/re2/wiki/Syntax, or search for it in quotation marks",
        ) from error


def _lines_of_text(leaf: Text, texts: Texts) -> Array:
    search, data = compiled(leaf).search, texts.data
    mask = np.zeros(len(texts.ends), bool)
    at = 0
    while (match := search(data, at)) is not None:
        start, end = match.span()
        index = int(np.searchsorted(texts.ends, start))
        lo, hi = texts.line(index)
        if end <= hi and _is_bounded(leaf, data, (lo, hi), start, end):
            mask[index] = True
            at = hi + 1
        else:
            at = start + 1
    return mask


def _is_bounded(leaf: Text, data: bytes, line: tuple[int, int], start: int, end: int) -> bool:
    """Return whether a match begins and ends where a word does, as far as the leaf asks for it."""
    lo, hi = line
    is_hard_left = leaf.is_open_left or start == lo or _is_gap(data, start)
    is_hard_right = leaf.is_open_right or end == hi or _is_gap(data, end)
    if is_hard_left and is_hard_right:
        return True
    first, last = start, end
    while first > lo and _IS_WORD[data[first - 1]]:
        first -= 1
    while last < hi and _IS_WORD[data[last]]:
        last += 1
    before = data[first:start].decode()
    found = data[start:end].decode()
    text = before + found + data[end:last].decode()
    is_left, is_right = is_word_at(text, len(before), len(before) + len(found))
    return (is_hard_left or is_left) and (is_hard_right or is_right)


def _is_gap(data: bytes, at: int) -> bool:
    return not (_IS_WORD[data[at - 1]] and _IS_WORD[data[at]])


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
