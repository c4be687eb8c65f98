"""Sums of collectives: per operation, group and size a count, a sum and a histogram.

Durations fall into 256 bins, eight to each doubling from a microsecond on: a percentile
read from them is at most 9 % above the true one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rankscope.wire.chunk import Column
from rankscope.wire.schema import RETURNED

NUM_BINS = 256
BINS_PER_DOUBLING = 8
BASE_NS = 1_000.0
MAX_SUM_NS = 1 << 62  # what a database number holds; a century of waiting
MAX_SIZES = 64  # per operation and group in one chunk; ragged sizes beyond are put into doublings
Array = np.ndarray[Any, np.dtype[Any]]


class OperationKey(NamedTuple):
    """What one row counts."""

    operation: str
    group: str
    size_bytes: int


class OperationSum:
    """Counts of one key; two of them add up."""

    __slots__ = ("blocked_ns", "count", "histogram", "max_ns", "min_ns", "open", "sum_ns")

    def __init__(self) -> None:
        self.count = self.open = self.sum_ns = self.blocked_ns = 0
        self.min_ns: int | None = None
        self.max_ns: int | None = None
        self.histogram = np.zeros(NUM_BINS, "<i8")

    def add(self, other: OperationSum) -> None:
        """Add another sum to this one."""
        self.count += other.count
        self.open += other.open
        self.sum_ns = min(self.sum_ns + other.sum_ns, MAX_SUM_NS)
        self.blocked_ns = min(self.blocked_ns + other.blocked_ns, MAX_SUM_NS)
        if other.min_ns is not None:
            self.min_ns = other.min_ns if self.min_ns is None else min(self.min_ns, other.min_ns)
        if other.max_ns is not None:
            self.max_ns = other.max_ns if self.max_ns is None else max(self.max_ns, other.max_ns)
        self.histogram += other.histogram

    def percentile_ms(self, share: float) -> float | None:
        """Return the duration that `share` of the finished ones stayed at or below."""
        total = int(self.histogram.sum())
        if total == 0 or self.max_ns is None or self.min_ns is None:
            return None
        index = int(np.searchsorted(np.cumsum(self.histogram), share * total))
        edge_ns = BASE_NS * 2 ** ((index + 1) / BINS_PER_DOUBLING)
        return min(max(edge_ns, self.min_ns), self.max_ns) / 1e6


def sum_collectives(columns: dict[str, Column]) -> dict[OperationKey, OperationSum]:
    """Return the sums of one decoded chunk of collectives."""
    duration = np.asarray(columns["duration_ns"])
    blocked = np.maximum(np.asarray(columns["blocked_ns"]), 0)
    sizes = _bounded(np.asarray(columns["size_bytes"]))
    state = np.asarray(columns["state"])
    rows: dict[OperationKey, list[int]] = {}
    names = zip(columns["operation"], columns["group"], sizes.tolist(), strict=True)
    for index, (operation, group, size) in enumerate(names):
        rows.setdefault(OperationKey(str(operation), str(group), size), []).append(index)
    sums: dict[OperationKey, OperationSum] = {}
    for key, indexes in rows.items():
        result = OperationSum()
        ended = duration[indexes]
        ended = ended[ended >= 0]
        result.count = len(indexes)
        result.open = int((state[indexes] <= RETURNED).sum())
        result.blocked_ns = _whole(blocked[indexes])
        if len(ended):
            result.sum_ns = _whole(ended)
            result.min_ns, result.max_ns = int(ended.min()), int(ended.max())
            result.histogram = np.bincount(bins_of(ended), minlength=NUM_BINS).astype("<i8")
        sums[key] = result
    return sums


def bins_of(duration_ns: Array) -> Array:
    """Return the bin of each duration."""
    octaves = np.log2(np.maximum(duration_ns, BASE_NS) / BASE_NS)
    return np.minimum((octaves * BINS_PER_DOUBLING).astype(np.int64), NUM_BINS - 1)


def _whole(values: Array) -> int:
    """Return a sum that cannot wrap, whatever an agent sent."""
    return min(int(values.sum(dtype=np.float64)), MAX_SUM_NS)


def _bounded(sizes: Array) -> Array:
    sizes = np.maximum(sizes, 0)
    return sizes if len(np.unique(sizes)) <= MAX_SIZES else doublings_of(sizes)


def doublings_of(sizes: Array) -> Array:
    """Return the next power of two of each size, so that ragged sizes are few."""
    doublings = np.exp2(np.ceil(np.log2(np.maximum(sizes, 1).astype(float))))
    return np.where(sizes == 0, 0, np.minimum(doublings, float(1 << 62)).astype(np.int64))
