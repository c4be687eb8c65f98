"""Terms of the index for a word with the number behind it, as `step 400` or `rank=3`.

Log lines repeat few words with many numbers: of `"step 400"` each block may hold both, and few
hold them side by side. A term is made of the last three letters of the word and of the number,
with one or two characters between them; so it is the same wherever the word begins.
"""

from __future__ import annotations

from typing import Any

import numpy as np

PAIR = "_"  # stands before such a term and within it
_LETTERS = 3
_MAX_DIGITS = 20
_LETTER, _DIGIT, _GAP = 1, 2, 3
_KINDS = np.zeros(256, np.uint8)  # what is beyond ASCII is none of these
_KINDS[:128] = _GAP
_KINDS[[*range(ord("a"), ord("z") + 1), *range(ord("A"), ord("Z") + 1)]] = _LETTER
_KINDS[ord("0") : ord("9") + 1] = _DIGIT
_KINDS[ord("\n")] = 0

Array = np.ndarray[Any, np.dtype[Any]]


def pairs_of(data: bytes) -> set[str]:
    """Return the terms for each word of three letters and more with a number behind it."""
    padded = b"\n" * (_LETTERS + 2) + data + b"\n"
    kinds = _KINDS[np.frombuffer(padded, np.uint8)]
    others = np.flatnonzero(kinds != _DIGIT)  # a number ends at the first behind it
    terms: set[str] = set()
    for num_gaps in (1, 2):
        starts = _numbers(kinds, num_gaps)
        ends = np.minimum(others[np.searchsorted(others, starts)], starts + _MAX_DIGITS)
        words = starts - num_gaps - _LETTERS
        found = {padded[lo:hi] for lo, hi in zip(words.tolist(), ends.tolist(), strict=True)}
        behind = _LETTERS + num_gaps
        for pair in found:
            word, number = pair[:_LETTERS].lower().decode(), pair[behind:].decode()
            terms.add(f"{PAIR}{word}{PAIR}{number}")
    return terms


def _numbers(kinds: Array, num_gaps: int) -> Array:
    """Return where numbers begin with so many characters between them and letters."""
    wanted = (*[_LETTER] * _LETTERS, *[_GAP] * num_gaps, _DIGIT)
    size = len(kinds) - len(wanted) + 1
    # From the number on back: few places are left after the first two.
    places = np.flatnonzero(kinds[len(wanted) - 1 :] == _DIGIT)[: max(size, 0)]
    for offset, kind in reversed(list(enumerate(wanted[:-1]))):
        places = places[kinds[places + offset] == kind]
    return places + len(wanted) - 1
