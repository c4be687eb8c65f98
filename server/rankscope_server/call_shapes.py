"""What the collectives of a chunk have in common: a job makes the same few calls in every step.

Sums, fingerprints and histograms look at each distinct call once and at its events as arrays.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rankscope.wire.arrays import sorted_distinct
from rankscope.wire.chunk import Column, Words

Array = np.ndarray[Any, np.dtype[Any]]
_MAX_REMEMBERED = 64  # calls of a chunk
_MAX_KNOWN = 2_048  # chunks
_SAMPLE = 256  # events in which nearly always every distinct call of a chunk is seen
_SAMPLE_OF_PART = 64  # the same of each of several chunks: a few steps


class CallShape(NamedTuple):
    """One distinct call; the names are those of columns of a chunk."""

    group: str
    operation: str
    reduce_op: str
    dtype: str
    call_site: str
    size_bytes: int
    peer_rank: int


@dataclass(frozen=True, slots=True)
class ShapedCalls:
    """`shapes[codes[n]]` is the call of event n. A shape may be there twice.

    Chunks with the same calls in the same order share one tuple of shapes.
    """

    codes: Array
    shapes: tuple[CallShape, ...]

    def part(self, events: slice) -> ShapedCalls:
        """Return those of some events."""
        return ShapedCalls(self.codes[events], self.shapes)


_NUMBERS = ("size_bytes", "peer_rank")
# The calls of chunks that were read: nearly all that come later make the same ones.
_known: dict[Hashable, tuple[CallShape, ...]] = {}
# Odd factors, other ones in each process: no sender can make two calls fall together.
_FACTORS = np.array([secrets.randbits(63) | 1 for _ in CallShape._fields], np.uint64).view(np.int64)


def shapes_of(
    columns: Mapping[str, Column], same: Collection[str] = (), begins: Array | None = None
) -> ShapedCalls:
    """Return the distinct calls of one decoded chunk of collectives, or of several.

    Of columns that are left out each event has an empty word or -1. `same` names columns that are
    known to hold one value, `begins` says where each of several chunks begins.
    """
    columns = {
        name: Words.of(column) if isinstance(column, list) else column
        for name, column in columns.items()
        if name in CallShape._fields
    }
    count = len(columns["operation"])
    keys = np.zeros(count, np.int64)
    for name, factor in zip(CallShape._fields, _FACTORS, strict=True):
        if name in columns and name not in same:
            keys += _numbers_of(columns[name]) * factor
    distinct, codes = _coded(keys, begins)
    if len(distinct) > _MAX_REMEMBERED:
        return ShapedCalls(codes, _read(columns, distinct, codes))
    meaning = [_meaning(columns.get(name), name in same) for name in CallShape._fields]
    known_by = (distinct.tobytes(), *meaning)
    shapes = _known.get(known_by)
    if shapes is None:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        shapes = _known[known_by] = _read(columns, distinct, codes)
    return ShapedCalls(codes, shapes)


def _meaning(column: Column | None, is_same: bool) -> Hashable:
    """Return what says, with the keys of the events, which calls they are."""
    if column is None:
        return None
    first = _numbers_of(column)[0].item() if is_same else 0
    return (first, *column.words) if isinstance(column, Words) else first


def _read(columns: Mapping[str, Column], distinct: Array, codes: Array) -> tuple[CallShape, ...]:
    first = np.empty(len(distinct), np.int64)
    first[codes] = np.arange(len(codes))
    fields = [_values_of(name, columns.get(name), first) for name in CallShape._fields]
    return tuple(map(CallShape._make, zip(*fields, strict=True)))


def _numbers_of(column: Column) -> Array:
    return column.codes if isinstance(column, Words) else np.asarray(column)


def _values_of(name: str, column: Column | None, events: Array) -> list[Any]:
    """Return what a column says of some events."""
    if column is None:
        return [-1 if name in _NUMBERS else ""] * len(events)
    if name in _NUMBERS:
        numbers: list[Any] = np.asarray(column, np.int64)[events].tolist()
        return numbers
    coded = Words.of(column)
    return [coded.words[code] for code in coded.codes[events].tolist()]


def _coded(keys: Array, begins: Array | None) -> tuple[Array, Array]:
    """Return the distinct keys in order, and the place of each key among them."""
    if begins is None or len(begins) == 1:
        sample = keys[:_SAMPLE]
    else:
        places = (begins[:, None] + np.arange(_SAMPLE_OF_PART)).reshape(-1)
        sample = keys[np.minimum(places, len(keys) - 1)]
    distinct = sorted_distinct(sample)
    codes = np.minimum(np.searchsorted(distinct, keys), len(distinct) - 1)
    if not np.array_equal(distinct[codes], keys):  # some come later only
        distinct, codes = np.unique(keys, return_inverse=True)
    return distinct, codes
