"""Work that is uneven from step to step: each time another rank is the last, and all wait for it.

No rank is slow, so none is named. What it costs is by how much the longest works longer, step by
step, than all would with the same work spread evenly; where it is mostly one of a few, than the
longest of the others. No more than one of them really waits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from rankscope.wire.formulas import rank_hours_per_day
from rankscope_server.diagnose.shared.comparison import do_alike
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import Finding
from rankscope_server.findings.policy import Policy
from rankscope_server.findings.statistics import Array
from rankscope_server.findings.text import hours_text, ms_text, percent_text, ranks_text
from rankscope_server.observe.deviation import Deviation
from rankscope_server.observe.rank_cost import clipped, step_times
from rankscope_server.observe.step_table import StepTable

_NAME = "uneven"


@dataclass(frozen=True, slots=True)
class Uneven:
    """What the rows of a role wait for the longest of them, in each of some steps."""

    mostly: list[int]  # few rows of which one is the longest in most of what is lost
    cost: float
    columns: Array
    longest_ms: float  # mean over steps
    even_ms: float  # without uneven work


def uneven_work(
    window: Window, deviation: Deviation, named: Collection[int]
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Return a finding of the role that loses most, without the ranks `named` by others.

    Where it loses too little for one, but something: a clause that says how much.
    """
    table, policy = window.steps, window.policy
    found = [
        uneven
        for rows in deviation.rows_by_role()
        if (uneven := _uneven(table, deviation, [r for r in rows if table.ranks[r] not in named],
                              policy))
    ]  # fmt: skip
    worst = max(found, key=lambda uneven: uneven.cost, default=None)
    old = window.before.get(f"{window.attempt}/balance/{_NAME}")
    least = policy.uneven_share * (1.0 if old is None else policy.cost_keep_share)
    if worst is None or worst.cost < policy.cost_info_ratio:
        return (), ()
    if worst.cost >= least:
        return (_finding_of(window, worst),), ()
    return (), (f"all wait {percent_text(worst.cost)} of the time for the rank that works longest "
                "in a step, each time another",)  # fmt: skip


def _uneven(
    table: StepTable, deviation: Deviation, rows: Sequence[int], policy: Policy
) -> Uneven | None:
    """Return what these rows lose in the newest steps, None for too few of either."""
    own = table.get("own")
    usual = ~table.special() & table.seen()
    usual[: deviation.first_column] = False
    if len(rows) < 2:
        return None
    usual &= ~np.isnan(own[rows]).any(axis=0)
    columns = np.flatnonzero(usual)[-policy.stall_steps :]
    if len(columns) < policy.recent_steps or not do_alike(table, rows, columns):
        return None
    times_ms = clipped(step_times(table, columns).astype(float))
    if times_ms.sum() < 1e3 * policy.persistent_seconds:
        return None
    work = own[rows][:, columns].astype(float)
    waits = table.get("blocked")[rows][:, columns].astype(float)
    most_ms = np.fmin(waits.max(axis=0) - waits.min(axis=0), times_ms)
    longest_ms = work.max(axis=0)
    lost_ms = np.fmin(longest_ms - work.mean(axis=0), most_ms)
    shares = np.bincount(work.argmax(axis=0), weights=lost_ms, minlength=len(rows))
    mostly = _mostly(shares / max(float(lost_ms.sum()), 1e-9), policy)
    even_ms = work.mean(axis=0)
    if len(mostly):  # the others show how long a step takes
        even_ms = np.delete(work, mostly, axis=0).max(axis=0)
        lost_ms = np.fmin(longest_ms - even_ms, most_ms)
    return Uneven(
        [rows[row] for row in mostly],
        cost=float(lost_ms.sum() / times_ms.sum()),
        columns=columns,
        longest_ms=float(longest_ms.mean()),
        even_ms=float(even_ms.mean()),
    )


def _mostly(shares: Array, policy: Policy) -> Array:
    """Return the rows that hold most of what is lost; none where they are half of all, or more."""
    order = np.argsort(-shares, kind="stable")
    least = int(np.searchsorted(np.cumsum(shares[order]), policy.uneven_most)) + 1
    few: Array = np.sort(order[:least])
    return few if 2 * least <= len(order) else few[:0]


def _finding_of(window: Window, found: Uneven) -> Finding:
    mostly = tuple(sorted(window.steps.ranks[row] for row in found.mostly))
    others = "the longest of the others" if mostly else "the mean of all"
    one = f"mostly one of {ranks_text(mostly)}" if len(mostly) > 1 else "another one"
    longest = f"mostly {ranks_text(mostly)}" if len(mostly) == 1 else one
    hours = rank_hours_per_day(window.world_size, found.cost)
    first = int(window.steps.steps[found.columns[0]])
    return window.finding(
        "uneven_work",
        _NAME,
        cost=found.cost,
        what=f"Ranks work unequally long in a step, {longest} the longest each time: "
        f"{percent_text(found.cost)} of the throughput is lost",
        why=f"In {len(found.columns):,} steps since step {first:,} the rank that works longest "
        f"takes {ms_text(found.longest_ms)} on average, {others} {ms_text(found.even_ms)}, and "
        f"all wait for it: {window.world_size} ranks lose {hours_text(hours)} a day. None of them "
        "is slow for long",
        next="Give ranks even work in each step: sort, bucket or pack samples by length across "
        "ranks, or cut a step by tokens; where batches are even, look at what else runs on "
        + (f"the hosts of {ranks_text(mostly)}" if mostly else "the hosts"),
        confidence=(0.8, "self time and waits of all ranks are measured, not why work is uneven"),
        ruled_out=("A slow rank: those that are have findings of their own, and are left out",),
        disproof="Ranks are meant to take turns, for example in logging or evaluating",
    )  # fmt: skip
