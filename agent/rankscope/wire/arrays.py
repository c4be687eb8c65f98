"""Arrays of whole numbers: which there are, and where they change.

For long arrays and small numbers, in a few passes; `np.unique` hashes or sorts them, and
`np.diff(..., prepend=...)` copies them several times.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
_MOST_APART = 32  # numbers between the least and the largest, for each value


def distinct(values: Array) -> Array:
    """Return whole numbers each once, ascending."""
    low = int(values.min()) if len(values) else 0
    if not len(values) or int(values.max()) - low > _MOST_APART * len(values):
        return sorted_distinct(values)
    found: Array = np.flatnonzero(np.bincount(values - low)) + low
    return found


def sorted_distinct(values: Array) -> Array:
    """Return what `distinct` does, of numbers that are known to be far apart, or few."""
    ordered = np.sort(values)
    found: Array = ordered[begins_of_runs(ordered)]
    return found


def first_places(values: Array) -> tuple[Array, Array]:
    """Return whole numbers each once, ascending, and the place where each is first."""
    low = int(values.min()) if len(values) else 0
    num = int(values.max()) - low + 1 if len(values) else 0
    if not 0 < num <= _MOST_APART * len(values):
        return np.unique(values, return_index=True)
    places = np.full(num, -1)
    places[values[::-1] - low] = np.arange(len(values) - 1, -1, -1)  # the last write stays
    known = np.flatnonzero(places >= 0)
    return known + low, places[known]


def begins_of_runs(values: Array) -> Array:
    """Return where a value is not the one before; the first place is one of these."""
    is_begin = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=is_begin[1:])
    return np.flatnonzero(is_begin)
