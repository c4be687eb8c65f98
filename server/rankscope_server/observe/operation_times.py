"""How long collectives take: a histogram per operation, size and group, in bounded memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rankscope.wire.chunk import Column
from rankscope.wire.schema import ENDED

Key: TypeAlias = tuple[str, str, int]  # group, operation, log2 of the bytes
MAX_KEYS = 8192
_BINS_PER_OCTAVE = 4  # a quantile is right within 19 %
_NUM_BINS = 160  # from 1 us to 2 ** 40 us


class OperationTimes:
    """Durations of collectives that ended, after the first step of each rank."""

    def __init__(self) -> None:
        self._counts: dict[Key, NDArray[np.int64]] = {}

    def add(self, columns: Mapping[str, Column]) -> None:
        """Take one chunk of collectives."""
        duration = np.asarray(columns["duration_ns"], np.int64)
        good = (np.asarray(columns["state"]) == ENDED) & (duration >= 0)
        good &= np.asarray(columns["step"]) > 1  # the first step includes start-up
        sizes = size_bucket(np.asarray(columns["size_bytes"], np.int64))
        octaves = np.log2(np.maximum(duration, 1000) / 1000)
        bins = np.minimum((octaves * _BINS_PER_OCTAVE).astype(np.int64), _NUM_BINS - 1)
        by_key: dict[Key, list[int]] = {}
        names = zip(columns["group"], columns["operation"], strict=True)
        for index, (group, operation) in enumerate(names):
            if good[index]:
                by_key.setdefault((group, operation, int(sizes[index])), []).append(index)
        for key, places in by_key.items():
            counts = self._counts.get(key)
            if counts is None and len(self._counts) < MAX_KEYS:
                counts = self._counts[key] = np.zeros(_NUM_BINS, np.int64)
            if counts is not None:
                counts += np.bincount(bins[places], minlength=_NUM_BINS)

    def quantile_ns(
        self, group: str, operation: str, size_bytes: int, share: float = 0.99
    ) -> float | None:
        """Return an upper bound of a quantile, None for an operation that never ended yet."""
        counts = self._counts.get((group, operation, int(size_bucket(np.array([size_bytes]))[0])))
        if counts is None:
            return None
        reached = np.cumsum(counts) >= share * counts.sum()
        return float(1000 * 2.0 ** ((int(np.argmax(reached)) + 1) / _BINS_PER_OCTAVE))


def size_bucket(size_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the octave of sizes: 0 for nothing, else 1 + floor(log2)."""
    return np.where(size_bytes > 0, 1 + np.floor(np.log2(np.maximum(size_bytes, 1))), 0).astype(
        np.int64
    )
