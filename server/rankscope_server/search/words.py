"""What a word is: a run of letters and digits, and each part of an identifier in camel case.

`ncclRemoteError` is one run of three parts. A text that is searched as a word must begin and end
where a run or a part does, so it is found by `nccl`, `remoteerror` and `error`, not by `rror`.
"""

from __future__ import annotations

import re
from functools import lru_cache

MAX_PARTS = 8  # a run of more is no identifier (base64): only the whole of it is a word
MAX_RUN = 64  # neither is a longer one, and the index holds so much of it
TRIGRAM = "_"  # stands before a trigram in the index; no word holds it
RUN = re.compile(r"[^\W_]+")
# Bytes that may be of a word; of those from 128 on the whole character decides.
IS_WORD_BYTE = bytes(byte >= 128 or chr(byte).isalnum() for byte in range(256))
_GAPS = bytes(byte if IS_WORD_BYTE[byte] else 32 for byte in range(256))
_PART = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


@lru_cache(4096)
def part_ends(run: str) -> tuple[int, ...]:
    """Return the positions within a run where a word may begin or end, its own ends included."""
    if len(run) > MAX_RUN or run.islower():  # most have no capital letters
        return (0, len(run))
    inner = [match.start() for match in _PART.finditer(run)]
    if len(inner) >= MAX_PARTS:
        inner = []
    return (0, *inner, len(run))


def is_word_at(text: str, start: int, end: int) -> tuple[bool, bool]:
    """Return whether a word may begin at `start`, and whether one may end at `end`."""
    return _is_end(text, start), _is_end(text, end)


def _is_end(text: str, at: int) -> bool:
    if not (0 < at < len(text)) or not (_is_letter(text[at - 1]) and _is_letter(text[at])):
        return True
    lo, hi = at, at
    while lo and _is_letter(text[lo - 1]):
        lo -= 1
    while hi < len(text) and _is_letter(text[hi]):
        hi += 1
    return at - lo in part_ends(text[lo:hi])


def _is_letter(character: str) -> bool:
    return character.isalnum()


def folded(text: str) -> str:
    """Return a text for comparison in any case."""
    return text.casefold()


def index_term(word: str) -> str:
    """Return the term by which the index knows a word."""
    return folded(word)[:MAX_RUN]


@lru_cache(16_384)
def terms_of_run(run: str) -> tuple[str, ...]:
    """Return the terms of the index for a run: its words, and its trigrams that hold a letter."""
    ends = part_ends(run)
    words = {
        index_term(run[lo:hi]) for at, lo in enumerate(ends) for hi in ends[at + 1 :] if hi > lo
    }
    return (*words, *(TRIGRAM + gram for gram in trigrams(run)))


def trigrams(run: str) -> set[str]:
    """Return the trigrams of a run; digits alone are in nearly every block and say nothing."""
    lower = folded(run)
    grams = {lower[at : at + 3] for at in range(len(lower) - 2)}
    return grams if lower.isalpha() else {gram for gram in grams if not gram.isdigit()}


def terms_of(data: bytes) -> set[str]:
    """Return the terms of the index for the texts of a block, in UTF-8."""
    # Each word once, then what is no letter beyond ASCII: a tenth of the time of RUN over it all.
    words = set(data.translate(_GAPS).split())
    text = b" ".join(words).decode()
    runs = set(text.split() if text.isascii() else RUN.findall(text))
    # Most runs are numbers, which have no parts and no trigrams.
    terms = {run for run in runs if run.isdigit() and len(run) <= MAX_RUN}
    for run in runs - terms:
        terms.update(terms_of_run(run))
    return terms
