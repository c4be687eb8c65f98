"""Levels of thinning: what they record, what they cost, and which one keeps a budget."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rankscope.wire import thinning


def test_levels_leave_out_call_sites_first_and_then_steps_evenly() -> None:
    assert [thinning.every(level) for level in range(5)] == [1, 1, 2, 4, 8]
    assert [step for step in range(1, 17) if not thinning.is_thinned(step, 3)] == [4, 8, 12, 16]
    assert not any(thinning.is_thinned(step, 1) for step in range(20))


@pytest.mark.parametrize("level", range(1, thinning.MAX_LEVEL))
def test_ranks_that_did_not_agree_share_the_steps_of_the_coarser_level(level: int) -> None:
    finer = {step for step in range(2000) if not thinning.is_thinned(step, level)}
    coarser = {step for step in range(2000) if not thinning.is_thinned(step, level + 1)}
    assert coarser < finer or level == 0
    assert len(coarser) >= 7


def test_a_level_out_of_range_is_the_coarsest() -> None:
    assert thinning.every(200) == thinning.every(thinning.MAX_LEVEL)


def costs(thinned_us: float, switch_us: float = 0.0) -> Callable[[int], float]:
    return lambda level: thinning.call_us(level, 100.0, thinned_us, switch_us)


@pytest.mark.parametrize(
    ("budget_us", "level"),
    [(200.0, 0), (100.0, 1), (60.0, 2), (33.0, 3), (22.0, 4), (13.0, 6)],
)
def test_the_lowest_level_that_fits(budget_us: float, level: int) -> None:
    found = thinning.lowest(lambda us: us <= budget_us, costs(10.0))
    assert found == level
    assert thinning.call_us(level, 100.0, 10.0) <= budget_us


def test_no_level_is_taken_that_gains_nothing() -> None:
    # 70 % of a call's cost stays in thinned steps: half the steps gain 15 %, a quarter another
    # 9 %, an eighth less than 5 %
    assert thinning.lowest(lambda us: False, costs(70.0)) == 3
    assert thinning.lowest(lambda us: False, costs(95.0)) == 1


def test_where_thinned_steps_cost_nothing_only_whole_ones_and_the_way_to_them_do() -> None:
    assert thinning.call_us(1, 100.0, 0.0, 60.0) == 100.0
    assert [thinning.call_us(level, 100.0, 0.0, 60.0) for level in (2, 3, 6)] == [80.0, 40.0, 5.0]
    assert thinning.lowest(lambda us: us <= 0.7, costs(0.0, 60.0)) == thinning.MAX_LEVEL
    assert thinning.lowest(lambda us: us <= 20, costs(0.0, 300.0)) == 6  # 200, 100, 50, 25, 12
