"""How long collectives take: a histogram per operation, size and group, in bounded memory."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rankscope.wire.schema import ENDED
from rankscope_server.observe.collectives import Collectives

Key: TypeAlias = tuple[str, str, int]  # group, operation, log2 of the bytes
MAX_KEYS = 8192
_BINS_PER_OCTAVE = 4  # a quantile is right within 19 %
_NUM_BINS = 160  # from 1 us to 2 ** 40 us


class OperationTimes:
    """Durations of collectives that ended, after the first step of each rank."""

    def __init__(self) -> None:
        self._counts: dict[Key, NDArray[np.int64]] = {}

    def add(self, events: Collectives) -> None:
        """Take collectives of ranks."""
        duration, codes = events["duration_ns"], events.codes
        good = (events["state"] == ENDED) & (duration >= 0)
        good &= events["step"] > 1  # the first step includes start-up
        if not good.all():
            duration, codes = duration[good], codes[good]
        octaves = np.log2(np.maximum(duration, 1000).astype(np.float32) / np.float32(1000))
        octaves *= _BINS_PER_OCTAVE
        bins = np.minimum(octaves, _NUM_BINS - 1).astype(np.int64)
        places: dict[Key, int] = {}
        sizes = size_bucket(np.array([shape.size_bytes for shape in events.shapes])).tolist()
        keys = [
            places.setdefault((shape.group, shape.operation, size), len(places))
            for shape, size in zip(events.shapes, sizes, strict=True)
        ]
        bins += (np.array(keys, np.int64) * _NUM_BINS)[codes]
        found = np.bincount(bins, minlength=len(places) * _NUM_BINS).reshape(-1, _NUM_BINS)
        for key, row in zip(places, found, strict=True):
            if not row.any():
                continue
            counts = self._counts.get(key)
            if counts is not None:
                counts += row
            elif len(self._counts) < MAX_KEYS:
                self._counts[key] = row.copy()

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
