"""What the collectives of a chunk have in common: a job makes the same few calls in every step.

Sums, fingerprints and histograms look at each distinct call once and at its events as arrays.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rankscope.wire.chunk import Column, Words

Array = np.ndarray[Any, np.dtype[Any]]
_SAMPLE = 256  # events in which nearly always every distinct call of a chunk is seen


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
    """`shapes[codes[n]]` is the call of event n. A shape may be there twice."""

    codes: Array
    shapes: list[CallShape]


_NUMBERS = ("size_bytes", "peer_rank")
# Odd factors, other ones in each process: no sender can make two calls fall together.
_FACTORS = np.array([secrets.randbits(63) | 1 for _ in CallShape._fields], np.uint64).view(np.int64)


def shapes_of(columns: Mapping[str, Column]) -> ShapedCalls:
    """Return the distinct calls of one decoded chunk of collectives.

    Of columns that are left out each event has an empty word or -1.
    """
    count = len(columns["operation"])
    coded = {
        name: Words.of(columns.get(name, Words(np.zeros(count, np.int64), [""])))
        for name in CallShape._fields
        if name not in _NUMBERS
    }
    numbers = {name: np.asarray(columns.get(name, _unknown(count)), np.int64) for name in _NUMBERS}
    numbers |= {name: column.codes for name, column in coded.items()}
    keys = np.zeros(count, np.int64)
    for name, factor in zip(CallShape._fields, _FACTORS, strict=True):
        keys += numbers[name] * factor
    distinct, codes = _coded(keys)
    first = np.empty(len(distinct), np.int64)
    first[codes] = np.arange(count)
    fields: list[list[Any]] = []
    for name in CallShape._fields:
        found = numbers[name][first].tolist()
        words = coded[name].words if name in coded else None
        fields.append(found if words is None else [words[code] for code in found])
    return ShapedCalls(codes, [CallShape(*field) for field in zip(*fields, strict=True)])


def _unknown(count: int) -> Array:
    return np.full(count, -1)


def _coded(keys: Array) -> tuple[Array, Array]:
    """Return the distinct keys in order, and the place of each key among them."""
    distinct = np.unique(keys[:_SAMPLE])
    codes = np.minimum(np.searchsorted(distinct, keys), len(distinct) - 1)
    if not np.array_equal(distinct[codes], keys):  # some come later only
        distinct, codes = np.unique(keys, return_inverse=True)
    return distinct, codes
