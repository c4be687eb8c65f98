"""How the times of two windows vary: of the parts of a step, and of each rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rankscope_server.api.compare.noise import Change, change_of, window_of
from rankscope_server.api.compare.parts import LABELS, STEP, Series
from rankscope_server.api.compare.schema import CompareSpread
from rankscope_server.findings.statistics import Array, median
from rankscope_server.findings.text import capital, ms_text

QUANTILES = (5, 25, 50, 75, 95)
MAX_RANKS = 12  # that are shown: those that changed most
_MINUS = "\N{MINUS SIGN}"


def quantiles_of(values: Array) -> list[float] | None:
    """Return the quantiles of what is known, in ms; None for nothing."""
    known = values[~np.isnan(values)]
    if not len(known):
        return None
    return [round(float(one), 4) for one in np.percentile(known, QUANTILES)]


def spreads_of(before: Series, after: Series, changes: Mapping[str, Change]) -> list[CompareSpread]:
    """Return how the step and each of its parts vary; parts that take no time are left out."""
    found = []
    for name, change in changes.items():
        old, new = quantiles_of(before[name]), quantiles_of(after[name])
        if any(any(one) for one in (old, new) if one is not None):
            label = "the step" if name == STEP else LABELS[name]
            found.append(_spread(label, old, new, change, part=name))
    return found


def rank_spreads_of(before: Array, after: Array, least_ratio: float) -> list[CompareSpread]:
    """Return the medians of all ranks, then the ranks whose median self time changed most.

    `before` and `after` are ranks x steps, in ms. Empty where they are not the same ranks.
    """
    if len(before) != len(after) or not before.size or not after.size:
        return []
    old, new = median(before), median(after)
    known = np.flatnonzero(~np.isnan(old) & ~np.isnan(new))
    if not len(known):
        return []
    # of the ranks' median, step by step
    change = change_of(window_of(median(before, 0)), window_of(median(after, 0)), least_ratio)
    found = [_spread("the medians of all ranks", quantiles_of(old), quantiles_of(new), change)]
    ordered = known[np.argsort(-np.abs(new[known] - old[known]), kind="stable")]
    for rank in ordered[:MAX_RANKS].tolist():
        change = change_of(window_of(before[rank]), window_of(after[rank]), least_ratio)
        quantiles = quantiles_of(before[rank]), quantiles_of(after[rank])
        found.append(_spread(f"rank {rank}", *quantiles, change, rank=rank))
    return found


def spread_text(
    parts: Sequence[CompareSpread], ranks: Sequence[CompareSpread], sizes: tuple[int, int]
) -> str:
    """Return which part moved, and whether all of its steps did; then which rank."""
    text = _part_text([one for one in parts if one.part != STEP])
    if sizes[0] != sizes[1]:
        return f"{text}; ranks are not compared one by one: there are {sizes[0]:,} and {sizes[1]:,}"
    return f"{text}; {_rank_text(ranks)}"


def _part_text(parts: Sequence[CompareSpread]) -> str:
    moved = [one for one in parts if one.state in ("longer", "shorter")]
    if not moved:
        return "No part of the step is distributed otherwise, beyond noise"
    most = max(moved, key=lambda one: abs(one.difference_ms or 0.0))
    old, new = most.before_ms or [], most.after_ms or []
    is_apart = old[-1] < new[0] or new[-1] < old[0]
    how = "moved as a whole" if is_apart else "moved in a part of its steps"
    steps = f"nine in ten steps took {_band(old)} before, and {_band(new)} after"
    return f"{capital(most.label)} {how}: {steps}"


def _rank_text(ranks: Sequence[CompareSpread]) -> str:
    if len(ranks) < 2:
        return "of single ranks it is not known"
    every, most = ranks[0], ranks[1]
    of_most, of_all = _signed(most.difference_ms), _signed(every.difference_ms)
    if most.state not in ("longer", "shorter"):
        return f"no rank's self time differs beyond noise (at most {of_most}, {most.label})"
    return (
        f"the self time of {most.label} changed most, by {of_most}; of the middle rank by {of_all}"
    )


def _band(quantiles: Sequence[float]) -> str:
    return f"{ms_text(quantiles[0])} to {ms_text(quantiles[-1])}"


def _signed(ms: float | None) -> str:
    if ms is None:
        return "an unknown time"
    return f"{'+' if ms >= 0 else _MINUS}{ms_text(abs(ms))}"


def _spread(
    label: str, old: list[float] | None, new: list[float] | None, change: Change, *,
    part: str = "", rank: int | None = None,
) -> CompareSpread:  # fmt: skip
    difference = None if np.isnan(change.difference) else change.difference
    return CompareSpread(
        label=label, before_ms=old, after_ms=new, difference_ms=difference, state=change.state,
        part=part, rank=rank,
    )  # fmt: skip
