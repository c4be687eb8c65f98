"""Whole numbers in arrays: what the quick ways find is what numpy finds."""

from __future__ import annotations

import numpy as np
import pytest

from rankscope.wire.arrays import begins_of_runs, distinct, first_places

NEAR = [5, 3, 3, 9, 5, 5, -2, 9, 0, 3]
ARRAYS = (
    np.array(NEAR),
    np.array([7]),
    np.array([1 << 61, -(1 << 61), 12, 1 << 61]),  # no room for a place each
    np.zeros(0, np.int64),
)


@pytest.mark.parametrize("values", ARRAYS, ids=["near", "one", "far", "none"])
def test_as_numpy_finds_them(values: np.ndarray) -> None:  # type: ignore[type-arg]
    assert distinct(values).tolist() == np.unique(values).tolist()
    wanted, places = np.unique(values, return_index=True)
    found, first = first_places(values)
    assert (found.tolist(), first.tolist()) == (wanted.tolist(), places.tolist())


@pytest.mark.parametrize(
    ("values", "begins"),
    [([4, 4, 4], [0]), ([-1, -1, 2, 2, -1], [0, 2, 4]), ([], []), ([0], [0])],
)
def test_where_a_value_changes(values: list[int], begins: list[int]) -> None:
    assert begins_of_runs(np.array(values, np.int64)).tolist() == begins
