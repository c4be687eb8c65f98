"""Finds in a block of bytes the lines that hold one of many texts, as fast as a library can.

google-re2 searches all texts in one pass (measured in benchmarks/explain.py); where it is not
installed each text is searched by itself, which gives the same lines, some fifty times as slowly.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

NO_LIBRARY = "no library"
_MAX_MEM_BYTES = 256 << 20  # of RE2 for its automaton; it stays far below


class Prefilter(Protocol):
    """Finds lines."""

    name: str

    def lines(self, block: bytes) -> Iterator[tuple[int, int]]:
        """Return start and end of every line that holds one of the texts, in order."""


def prefilter(texts: Sequence[str]) -> Prefilter:
    """Return the fastest way that is installed."""
    if importlib.util.find_spec("re2") is not None:
        return _OnePass(texts)
    return _EachText(texts)


class _OnePass:
    """All texts in one pass of RE2."""

    name = "google-re2"

    def __init__(self, texts: Sequence[str]) -> None:
        re2: Any = importlib.import_module("re2")
        options = re2.Options()
        options.case_sensitive = False
        options.encoding = re2.Options.Encoding.LATIN1  # bytes: no byte is wrong
        options.max_mem = _MAX_MEM_BYTES
        options.log_errors = False
        joined = "|".join(re2.escape(text) for text in texts)
        self._search = re2.compile(joined.encode(), options).search

    def lines(self, block: bytes) -> Iterator[tuple[int, int]]:
        """Return start and end of every line that holds one of the texts, in order."""
        at, size = 0, len(block)
        while at < size:
            found = self._search(block, at)
            if found is None:
                return
            start, end = _line(block, found.start())
            yield start, end
            at = end + 1


class _EachText:
    """One search of the standard library for each text."""

    name = NO_LIBRARY

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = [text.encode() for text in _shortest(texts)]

    def lines(self, block: bytes) -> Iterator[tuple[int, int]]:
        """Return start and end of every line that holds one of the texts, in order."""
        lowered = block.lower()
        found: dict[int, int] = {}
        for text in self._texts:
            at = lowered.find(text)
            while at >= 0:
                start, end = _line(block, at)
                found[start] = end
                at = lowered.find(text, end)
        yield from sorted(found.items())


def _shortest(texts: Sequence[str]) -> list[str]:
    """Return the texts that hold no other one of them."""
    joined = sorted(texts, key=len)
    kept: list[str] = []
    for text in joined:
        if not any(one in text for one in kept):
            kept.append(text)
    return kept


def _line(block: bytes, at: int) -> tuple[int, int]:
    end = block.find(b"\n", at)
    return block.rfind(b"\n", 0, at) + 1, len(block) if end < 0 else end
