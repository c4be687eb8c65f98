"""Sums of collectives: per operation, group and size a count, a sum and a histogram.

Durations fall into 256 bins, eight to each doubling from a microsecond on: a percentile
read from them is at most 9 % above the true one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from rankscope.wire.chunk import Column
from rankscope.wire.schema import RETURNED
from rankscope_server.call_shapes import CallShape, ShapedCalls

NUM_BINS = 256
BINS_PER_DOUBLING = 8
BASE_NS = 1_000.0
MAX_SUM_NS = 1 << 62  # what a database number holds; a century of waiting
_SURELY_WHOLE_NS = float(1 << 61)  # far from what an int64 holds
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


@dataclass(frozen=True, slots=True)
class CallDurations:
    """The collectives of one chunk, as much of them as sums need; arrays of one length."""

    keys: list[OperationKey]
    codes: Array  # of each event, the place of its key
    duration_ns: Array
    blocked_ns: Array
    state: Array

    def part(self, events: slice) -> CallDurations:
        """Return those of some events."""
        return CallDurations(
            self.keys, self.codes[events], self.duration_ns[events], self.blocked_ns[events],
            self.state[events],
        )  # fmt: skip


def durations_of(columns: Mapping[str, Column], calls: ShapedCalls) -> CallDurations:
    """Return what of one decoded chunk of collectives is summed."""
    few = len(calls.shapes) <= MAX_SIZES
    keys, codes = (_known_keys_of if few else _keys_of)(calls.shapes)
    return CallDurations(
        keys=keys,
        codes=codes[calls.codes],
        duration_ns=np.asarray(columns["duration_ns"]),
        blocked_ns=np.asarray(columns["blocked_ns"]),
        state=np.asarray(columns["state"]),
    )


def _keys_of(shapes: tuple[CallShape, ...]) -> tuple[list[OperationKey], Array]:
    """Return the distinct keys of some calls, and the place of each call's key among them."""
    sizes = _bounded([shape.size_bytes for shape in shapes])
    places: dict[OperationKey, int] = {}
    codes = [
        places.setdefault(OperationKey(shape.operation, shape.group, size), len(places))
        for shape, size in zip(shapes, sizes, strict=True)
    ]
    return list(places), np.array(codes)


_known_keys_of = lru_cache(maxsize=2_048)(_keys_of)


def sum_collectives(chunks: Sequence[CallDurations]) -> dict[OperationKey, OperationSum]:
    """Return the sums of some chunks together."""
    places: dict[OperationKey, int] = {}
    parts = []
    for chunk in chunks:
        known = [places.setdefault(key, len(places)) for key in chunk.keys]
        parts.append(np.array(known)[chunk.codes])
    if not parts:
        return {}
    codes = np.concatenate(parts)
    duration = np.concatenate([chunk.duration_ns for chunk in chunks])
    blocked = np.maximum(np.concatenate([chunk.blocked_ns for chunk in chunks]), 0)
    is_open = np.concatenate([chunk.state for chunk in chunks]) <= RETURNED
    num = len(places)
    count, num_open = np.bincount(codes, minlength=num), np.bincount(codes[is_open], minlength=num)
    ended = duration >= 0
    totals = _totals(codes[ended], duration[ended], num)
    waits = _totals(codes, blocked, num)
    bins = codes[ended] * NUM_BINS + bins_of(duration[ended])
    histograms = np.bincount(bins, minlength=num * NUM_BINS).reshape(num, NUM_BINS)
    sums: dict[OperationKey, OperationSum] = {}
    for key, place in places.items():
        result = sums[key] = OperationSum()
        result.count, result.open = int(count[place]), int(num_open[place])
        result.blocked_ns = waits.get(place, _NOTHING).sum_ns
        total = totals.get(place, _NOTHING)
        result.sum_ns, result.min_ns, result.max_ns = total
        result.histogram = histograms[place].astype("<i8")
    return sums


class _Total(NamedTuple):
    """Of one key."""

    sum_ns: int
    min_ns: int | None
    max_ns: int | None


_NOTHING = _Total(0, None, None)


def _totals(codes: Array, values: Array, num: int) -> dict[int, _Total]:
    """Return sum, least and most of the values of each code that has one."""
    if not len(codes):
        return {}
    order = np.argsort(codes.astype(np.uint16) if num < 1 << 16 else codes, kind="stable")
    ordered, values = codes[order], values[order]
    begins = np.flatnonzero(np.diff(ordered, prepend=-1))
    # Whole numbers are exact, and wrap beyond what a database holds; floats show when.
    rough = np.add.reduceat(values.astype(np.float64), begins)
    sums = np.where(rough < _SURELY_WHOLE_NS, np.add.reduceat(values, begins), MAX_SUM_NS)
    rows = (ordered[begins], sums, np.minimum.reduceat(values, begins),
            np.maximum.reduceat(values, begins))  # fmt: skip
    return {
        code: _Total(*total) for code, *total in zip(*(row.tolist() for row in rows), strict=True)
    }


def bins_of(duration_ns: Array) -> Array:
    """Return the bin of each duration."""
    octaves = np.log2(np.maximum(duration_ns, BASE_NS) / BASE_NS)
    return np.minimum((octaves * BINS_PER_DOUBLING).astype(np.int64), NUM_BINS - 1)


def _bounded(sizes: list[int]) -> list[int]:
    """Return the sizes, in doublings where a chunk has too many of them."""
    sizes = [max(size, 0) for size in sizes]
    if len(set(sizes)) <= MAX_SIZES:
        return sizes
    bounded: list[int] = doublings_of(np.array(sizes)).tolist()
    return bounded


def doublings_of(sizes: Array) -> Array:
    """Return the next power of two of each size, so that ragged sizes are few."""
    doublings = np.exp2(np.ceil(np.log2(np.maximum(sizes, 1).astype(float))))
    return np.where(sizes == 0, 0, np.minimum(doublings, float(1 << 62)).astype(np.int64))
