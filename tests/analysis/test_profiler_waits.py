"""Who waited for whom in profiles: whatever threads of the library did and in which order."""

from __future__ import annotations

import numpy as np
import pytest

from rankscope_server.importers.profiler_trace import Operation
from rankscope_server.importers.profiler_waits import Placed, match, union, waits

NO_WORK = np.zeros((0, 2))


def call(
    start: float, took: float, size: int = 8, kind: str = "all_reduce", step: int = 1
) -> Placed:
    args = {"Input Dims": [[size]], "Input type": ["float"]}
    return Placed(Operation(kind, start, took, args, False), "0", kind, step, took)


def test_calls_that_threads_take_up_in_another_order_are_matched_by_size() -> None:
    ranks = {0: [call(0, 50, 8), call(1, 60, 16)], 1: [call(40, 20, 16), call(41, 10, 8)]}
    match(ranks)
    assert [(rank.call[1], rank.sequence) for rank in ranks[0]] == [(32, 1), (64, 2)]
    assert [(rank.call[1], rank.sequence) for rank in ranks[1]] == [(64, 2), (32, 1)]
    assert [rank.waited_us for rank in ranks[0]] == [40, 40]
    assert [rank.waited_us for rank in ranks[1]] == [0, 0]


def test_waits_that_are_open_together_count_once() -> None:
    """Two buckets on two threads: the rank waited for 41 us, not for 80."""
    ranks = {0: [call(0, 50, 8), call(1, 60, 16)], 1: [call(40, 20, 16), call(41, 10, 8)]}
    match(ranks)
    assert waits(ranks[0], NO_WORK).tolist() == [[0, 41]]
    assert waits(ranks[1], NO_WORK).tolist() == []


def test_what_computation_covers_is_no_wait() -> None:
    ranks = {0: [call(0, 100)], 1: [call(90, 10)]}
    match(ranks)
    work = union([(10, 30), (20, 40), (80, 200)])
    assert waits(ranks[0], work).tolist() == [[0, 10], [40, 80]]


@pytest.mark.parametrize("change", [{"size": 16}, {"kind": "broadcast"}])
def test_a_step_whose_calls_differ_is_not_compared(change: dict[str, object]) -> None:
    ranks = {0: [call(0, 50)], 1: [call(40, 10, **change)]}  # type: ignore[arg-type]
    match(ranks)
    assert [one.sequence for placed in ranks.values() for one in placed] == [0, 0]
    assert [one.waited_us for placed in ranks.values() for one in placed] == [0, 0]


def test_calls_are_numbered_on_over_steps_that_differ() -> None:
    ranks = {
        0: [call(0, 5, step=1), call(10, 5, step=2), call(20, 5, step=3)],
        1: [call(0, 5, step=1), call(20, 5, step=3)],
    }
    match(ranks)
    # a rank that has no call in a step is not among those that are compared in it
    assert [rank.sequence for rank in ranks[0]] == [1, 2, 3]
    assert [rank.sequence for rank in ranks[1]] == [1, 3]
