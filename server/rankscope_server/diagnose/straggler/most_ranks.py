"""Most ranks of a role became slower together, and a few did not.

Compared with their peers they look as before, and the few look fast: the median is one of the slow.
That the job became slower shows in its steps. Compared with their own steps before, its ranks split
into those that became slower and those that did not and wait. Where all did, none is named.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.wire.formulas import throughput_loss
from rankscope_server.diagnose.straggler.small_groups import of_each, of_rows, open_case, open_spell
from rankscope_server.diagnose.straggler.words import Case
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.policy import Policy
from rankscope_server.observe.deviation import Deviation
from rankscope_server.observe.episodes import turning_point
from rankscope_server.observe.rank_cost import Cost, excess_between, middle, step_times
from rankscope_server.observe.step_table import StepTable

Array = NDArray[Any]
_AS_BEFORE = 0.25  # of the rise of the slow ones, that the others have at most
_WAITED_SHARE = 0.5  # of that rise, that each of the others waits more


@dataclass(frozen=True, slots=True)
class _Split:
    """Rows that became slower and rows that did not, with the columns before and since."""

    slow: list[int]
    calm: list[int]
    worst: int  # the slow row that became slower by most
    rise: float  # ln(own work since / before) of that row
    before: Array
    since: Array  # from the onset on


def slow_majority(window: Window, found: Deviation, named: Collection[int]) -> list[Case]:
    """Return groups of more than half of a role that became slower; none of a role in `named`."""
    cases = []
    for rows in found.rows_by_role():
        if len(rows) < 3 or not set(rows).isdisjoint(named):
            continue
        split = _split(window.steps, found, rows, window.policy)
        case = _case(window, split) if split is not None else None
        if case is not None:
            cases.append(case)
    return cases


def _split(table: StepTable, found: Deviation, rows: list[int], policy: Policy) -> _Split | None:
    """Return how the rows of a role differ since the job became slower, None where they do not."""
    usual = ~table.special() & table.seen()
    usual[: found.first_column] = False
    columns = np.flatnonzero(usual)
    if len(columns) < policy.baseline_min_steps + policy.persistent_steps:
        return None
    step = step_times(table, columns)
    calm = middle(step[: policy.baseline_min_steps])
    lately = middle(step[-policy.persistent_steps :])
    if not np.log(lately / calm) > policy.ln_entry_floor:
        return None
    onset = turning_point(np.log(step / calm), 0.0, float(np.log(lately / calm)))
    if onset < policy.healthy_min_steps or len(columns) - onset < policy.persistent_steps:
        return None
    before, since = columns[:onset][-policy.healthy_long_steps :], columns[onset:]
    now, then = (
        of_each(table, "own", rows, part) for part in (since[-policy.cost_steps :], before)
    )
    rises = np.log(now / then)
    order = np.argsort(rises)
    gaps = np.diff(rises[order])
    if np.isnan(gaps).any():
        return None
    cut = int(np.argmax(gaps)) + 1
    slow, quiet = order[cut:], order[:cut]
    least = float(rises[slow[0]])
    if 2 * len(slow) <= len(rows) or least < np.log(policy.company_ratio):
        return None  # fewer than that are compared with their peers
    if float(rises[quiet[-1]]) > _AS_BEFORE * least:
        return None
    at = np.array(rows)
    return _Split(
        at[slow].tolist(), at[quiet].tolist(), int(at[slow[-1]]), float(rises[slow[-1]]), before,
        since,
    )  # fmt: skip


def _case(window: Window, split: _Split) -> Case | None:
    """Return what they cost; None where it is little, or the others do not wait for them."""
    table, policy = window.steps, window.policy
    lately = split.since[-policy.cost_steps :]
    cost = _cost_of(table, split, lately)
    if cost is None or not cost.sure >= policy.cost_silent_ratio:
        return None
    excess = excess_between(
        lambda name: of_rows(table, name, split.slow, lately),
        lambda name: of_rows(table, name, split.slow, split.before),
    )
    ranks = tuple(sorted(table.ranks[row] for row in split.slow))
    own = table.get("own")[split.worst]
    rose = np.log(own[split.since] / middle(own[split.before]))
    spell = open_spell(split.worst, split.since, rose, split.rise, policy)
    return open_case(window, ranks, spell, excess, cost, len(split.calm), has_peers=False)


def _cost_of(table: StepTable, split: _Split, lately: Array) -> Cost | None:
    """Return what the job's steps lost, None where the calm ranks do not wait for the others."""

    def rise_ms(metric: str, rows: list[int]) -> Array:
        since, before = (of_each(table, metric, rows, part) for part in (lately, split.before))
        return since - before

    later_ms = float(np.median(rise_ms("own", split.slow)))
    if float(rise_ms("blocked", split.calm).min()) < _WAITED_SHARE * later_ms:
        return None
    now, then = (middle(step_times(table, columns)) for columns in (lately, split.before))
    ratio = throughput_loss(now, then)
    return Cost(ratio, ratio, now, then)
