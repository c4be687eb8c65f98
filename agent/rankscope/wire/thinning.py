"""Levels of thinning: what recording of collectives leaves out to keep its budget.

Level 0 records everything, level 1 leaves out call sites, level k from 2 on records one step in
2^(k-1) whole: those whose number is a multiple of it. So ranks that could not agree still share
steps: those of a coarser level are among those of every finer one. Nothing is ever off: in the
other steps each collective is counted, for hangs and desyncs.
"""

from __future__ import annotations

from collections.abc import Callable

NO_CALL_SITES = 1
MAX_LEVEL = 9  # one step in 256
_LEAST_GAIN = 0.95  # a level that costs more than this share of the one before is not worth it
_SITES_SHARE = 0.15  # of a call's cost, until level 1 has been measured


def every(level: int) -> int:
    """Return every how many steps one is recorded whole."""
    return 1 << max(0, min(level, MAX_LEVEL) - 1)


def is_thinned(step: int, level: int) -> bool:
    """Return whether a step is only counted at this level."""
    return step % every(level) != 0


def words(level: int) -> str:
    """Return what a level leaves out."""
    if level <= 0:
        return "everything is recorded"
    if level == NO_CALL_SITES:
        return "without call sites"
    return f"one step in {every(level)} is recorded whole, without call sites"


def call_us(level: int, whole_us: float, thinned_us: float, switch_us: float = 0.0) -> float:
    """Return what a collective costs on average at a level, in microseconds.

    `whole_us` is what one of a whole step costs without call sites, `thinned_us` the other;
    `switch_us` what going from thinned steps to a whole one and back adds to each of its calls.
    """
    if level <= 0:
        return whole_us / (1 - _SITES_SHARE)
    share = 1 / every(level)
    return share * (whole_us + switch_us * (share < 1)) + (1 - share) * thinned_us


def lowest(fits: Callable[[float], bool], cost_us: Callable[[int], float]) -> int:
    """Return the lowest level whose cost `fits`, or behind which none gains enough."""
    level, cost = 0, cost_us(0)
    while level < MAX_LEVEL and not fits(cost):
        next_cost = cost_us(level + 1)
        if level == NO_CALL_SITES:  # the way to whole steps may cost more than half of them save
            best = min(cost_us(later) for later in range(level + 1, MAX_LEVEL + 1))
            if next_cost > _LEAST_GAIN * cost and best > _LEAST_GAIN**2 * cost:
                break
        elif level > NO_CALL_SITES and next_cost > _LEAST_GAIN * cost:
            break
        level, cost = level + 1, next_cost
    return level
