"""Whether two windows of steps differ by more than each of them varies. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from rankscope_server.findings.policy import POLICY
from rankscope_server.findings.statistics import Array

State: TypeAlias = Literal["longer", "shorter", "same", "unknown"]
LEAST_STEPS = POLICY.steady_steps  # fewer do not show how much a window varies
BLOCKS, _BLOCK_STEPS = 10, 4  # at most so many blocks, of at least so many steps
# Of all pairs of a block of one side and a block of the other so many differ in one direction. By
# chance 0.3 % of windows of 10 blocks do, 1 % of 7 (Mann & Whitney 1947), where blocks are
# independent; one odd block on each side changes nothing.
PAIRS_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Window:
    """What a series of one window says; NaN where nothing is known."""

    median: float = np.nan
    p95: float = np.nan
    count: int = 0  # steps that are known
    blocks: Array = field(default_factory=lambda: np.zeros(0))  # medians; none of too few steps


@dataclass(frozen=True, slots=True)
class Change:
    """How a number differs: the medians, and between what bounds pairs of blocks do."""

    difference: float
    low: float
    high: float
    state: State


def window_of(values: Array) -> Window:
    """Return what the values of consecutive steps say; NaN is a step that is not known."""
    known = np.asarray(values, np.float64)
    known = known[~np.isnan(known)]
    if not len(known):
        return Window()
    middle, p95 = np.percentile(known, (50, 95)).tolist()
    if len(known) < LEAST_STEPS:
        return Window(middle, p95, len(known))
    parts = np.array_split(known, min(BLOCKS, len(known) // _BLOCK_STEPS))
    return Window(middle, p95, len(known), np.array([np.median(part) for part in parts]))


def change_of(before: Window, after: Window, least_ratio: float) -> Change:
    """Return how two windows differ.

    Blocks are compared, not steps: load that wanders moves many steps in a row. A difference also
    has to be `least_ratio` of the larger median, which comes of itself.
    """
    difference = after.median - before.median
    if not len(before.blocks) or not len(after.blocks):
        return Change(difference, np.nan, np.nan, "unknown")
    pairs = np.subtract.outer(after.blocks, before.blocks)
    low = float(np.quantile(pairs, 1 - PAIRS_SHARE, method="higher"))
    high = float(np.quantile(pairs, PAIRS_SHARE, method="lower"))
    least = least_ratio * max(before.median, after.median)
    if abs(difference) <= least or low <= 0 <= high or difference * low < 0:
        return Change(difference, low, high, "same")
    return Change(difference, low, high, "longer" if difference > 0 else "shorter")
