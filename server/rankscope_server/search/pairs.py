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
    is_digit = kinds == _DIGIT
    # Where numbers begin and, one for one, end: data begins and ends with none.
    begins, ends = np.flatnonzero(is_digit[1:] != is_digit[:-1]).reshape(-1, 2).T + 1
    terms: set[str] = set()
    for num_gaps in (1, 2):
        chosen = _are_behind_words(kinds, begins, num_gaps)
        words = begins[chosen] - num_gaps - _LETTERS
        limits = np.minimum(ends, begins + _MAX_DIGITS)[chosen]
        behind = _LETTERS + num_gaps
        for pair in {padded[lo:hi] for lo, hi in zip(words.tolist(), limits.tolist(), strict=True)}:
            word, number = pair[:_LETTERS].lower().decode(), pair[behind:].decode()
            terms.add(f"{PAIR}{word}{PAIR}{number}")
    return terms


def _are_behind_words(kinds: Array, begins: Array, num_gaps: int) -> Array:
    """Return which numbers have so many characters between them and three letters."""
    chosen = np.ones(len(begins), bool)
    for distance in range(1, num_gaps + _LETTERS + 1):
        chosen &= kinds[begins - distance] == (_GAP if distance <= num_gaps else _LETTER)
    return chosen
