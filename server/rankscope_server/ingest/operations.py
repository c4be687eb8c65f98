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
_EXACT_NS = float(1 << 53)  # sums of whole numbers below are exact as floats
_MORE_THAN_ALL_NS = 1 << 62
_EVENTS_AT_ONCE = 1 << 15
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
    known = [np.array([places.setdefault(key, len(places)) for key in one.keys]) for one in chunks]
    sums = _Sums(len(places))
    begin, num_events = 0, 0
    for end, chunk in enumerate(chunks, 1):  # some at a time, that stay near the processor
        num_events += len(chunk.codes)
        if num_events >= _EVENTS_AT_ONCE or end == len(chunks):
            sums.add(chunks[begin:end], known[begin:end])
            begin, num_events = end, 0
    return {key: sums.of(place) for key, place in places.items()}


class _Sums:
    """Counts and sums of some keys, arrays by the place of a key."""

    def __init__(self, num: int) -> None:
        self._count, self._open, self._sum_ns, self._blocked_ns = np.zeros((4, num), np.int64)
        self._min_ns, self._max_ns = np.full(num, _MORE_THAN_ALL_NS), np.full(num, -1)
        # What whole numbers wrap beyond what a database holds; floats show when.
        self._rough_ns, self._rough_blocked_ns = np.zeros((2, num))
        self._histograms = np.zeros((num, NUM_BINS), "<i8")

    def add(self, chunks: Sequence[CallDurations], places: Sequence[Array]) -> None:
        """Add chunks; `places` are those of the keys of each."""
        codes, duration, blocked, state = (
            column[0] if len(column) == 1 else np.concatenate(column)
            for column in (
                [place[chunk.codes] for place, chunk in zip(places, chunks, strict=True)],
                [chunk.duration_ns for chunk in chunks],
                [chunk.blocked_ns for chunk in chunks],
                [chunk.state for chunk in chunks],
            )
        )
        num = len(self._count)
        self._count += np.bincount(codes, minlength=num)
        is_open = state <= RETURNED
        if is_open.any():
            self._open += np.bincount(codes[is_open], minlength=num)
        blocked = np.maximum(blocked, 0)
        _add(self._blocked_ns, self._rough_blocked_ns, codes, blocked)
        ended = duration >= 0
        if not ended.all():
            codes, duration = codes[ended], duration[ended]
        _add(self._sum_ns, self._rough_ns, codes, duration)
        np.minimum.at(self._min_ns, codes, duration)
        np.maximum.at(self._max_ns, codes, duration)
        bins = codes * NUM_BINS + bins_of(duration)
        self._histograms += np.bincount(bins, minlength=num * NUM_BINS).reshape(num, NUM_BINS)

    def of(self, place: int) -> OperationSum:
        """Return the sums of one key."""
        found = OperationSum()
        found.count, found.open = int(self._count[place]), int(self._open[place])
        found.sum_ns = _whole(self._sum_ns[place], self._rough_ns[place])
        found.blocked_ns = _whole(self._blocked_ns[place], self._rough_blocked_ns[place])
        if self._max_ns[place] >= 0:
            found.min_ns, found.max_ns = int(self._min_ns[place]), int(self._max_ns[place])
        found.histogram = self._histograms[place].copy()  # it may be kept, the others not
        return found


def _add(sums: Array, rough: Array, codes: Array, values: Array) -> None:
    """Add values to the sums of their codes, whole and as floats."""
    more = np.bincount(codes, weights=values, minlength=len(sums))
    rough += more
    if len(codes) and more.max() < _EXACT_NS:  # no sum on the way was rounded
        sums += more.astype(np.int64)
    else:
        np.add.at(sums, codes, values)


def _whole(sum_ns: np.int64, rough_ns: float) -> int:
    return int(sum_ns) if rough_ns < _SURELY_WHOLE_NS else MAX_SUM_NS


def bins_of(duration_ns: Array) -> Array:
    """Return the bin of each duration."""
    octaves = np.maximum(duration_ns, BASE_NS)
    octaves /= BASE_NS
    np.log2(octaves, out=octaves)
    octaves *= BINS_PER_DOUBLING
    return np.minimum(octaves.astype(np.int64), NUM_BINS - 1)


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
