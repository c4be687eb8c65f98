"""Most ranks of a role became slower together, and a few did not.

Compared with their peers they look as ever, and the few look fast: the median is one of the slow.
That the job became slower shows in its steps; compared with their own steps before, its ranks part
into those that did and those that did not and wait for them. Where all did, nobody is told apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.formulas import throughput_loss
from rankscope_server.detectors.deviation import Deviation
from rankscope_server.detectors.policy import Policy
from rankscope_server.detectors.robust import median
from rankscope_server.detectors.spells import Spell, turning_point
from rankscope_server.detectors.step_table import StepTable
from rankscope_server.detectors.straggler_cost import Cost, excess_between, middle, step_times
from rankscope_server.detectors.straggler_small import of_rows, open_case
from rankscope_server.detectors.straggler_words import Case
from rankscope_server.detectors.window import Window

Array = NDArray[Any]
_AS_BEFORE = 0.25  # of the rise of the slow ones, that the others have at most
_WAITED_SHARE = 0.5  # of that rise, that each of the others waits more


@dataclass(frozen=True, slots=True)
class _Parted:
    """Rows that became slower and rows that did not, with the columns before and since."""

    slow: list[int]
    calm: list[int]
    before: Array
    since: Array
    rises: Array  # ln(own work since / before) of every row of the step table


def slow_majority(window: Window, found: Deviation, spells: Sequence[Spell]) -> list[Case]:
    """Return the groups of more than half of a role that became slower, beside open `spells`."""
    table = window.steps
    explained = {spell.row for spell in spells if not spell.ended}
    cases = []
    for role in dict.fromkeys(found.roles):
        rows = [row for row, other in enumerate(found.roles) if other == role]
        if len(rows) < 3 or explained.intersection(rows):
            continue
        parted = _parted(table, found, rows, window.policy)
        case = _case(window, parted) if parted is not None else None
        if case is not None:
            cases.append(case)
    return cases


def _parted(table: StepTable, found: Deviation, rows: list[int], policy: Policy) -> _Parted | None:
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
    since = since[-policy.cost_steps :]
    own = table.get("own").astype(float)
    rises = np.log(median(own[:, since], 1) / median(own[:, before], 1))
    order = sorted(rows, key=lambda row: rises[row])
    gaps = np.diff(rises[order])
    if np.isnan(gaps).any():
        return None
    cut = int(np.argmax(gaps)) + 1
    slow, quiet = order[cut:], order[:cut]
    least = float(rises[slow].min())
    is_parted = least >= np.log(policy.company_ratio) and (
        float(rises[quiet].max()) <= _AS_BEFORE * least
    )
    return _Parted(slow, quiet, before, since, rises) if is_parted else None


def _case(window: Window, parted: _Parted) -> Case | None:
    """Return what they cost; None where it is little, or the others do not wait for them."""
    table, policy = window.steps, window.policy
    cost = _cost_of(table, parted)
    if 2 * len(parted.slow) <= len(parted.slow) + len(parted.calm):
        return None  # so few are compared with their peers
    if cost is None or not cost.sure >= policy.cost_silent_ratio:
        return None
    excess = excess_between(
        lambda name: of_rows(table, name, parted.slow, parted.since),
        lambda name: of_rows(table, name, parted.slow, parted.before),
    )
    ranks = tuple(sorted(table.ranks[row] for row in parted.slow))
    spell = _spell_of(table, parted, policy)
    return open_case(window, ranks, spell, excess, cost, len(parted.calm), has_peers=False)


def _cost_of(table: StepTable, parted: _Parted) -> Cost | None:
    """Return what the job's steps lost, None where the calm ranks do not wait for the others."""
    own, blocked = (table.get(name).astype(float) for name in ("own", "blocked"))

    def rise_ms(values: Array, rows: list[int]) -> Array:
        since, before = (
            median(values[np.ix_(np.array(rows), columns)], 1)
            for columns in (parted.since, parted.before)
        )
        return np.asarray(since - before)

    later_ms = float(np.median(rise_ms(own, parted.slow)))
    if float(rise_ms(blocked, parted.calm).min()) < _WAITED_SHARE * later_ms:
        return None
    now, then = (middle(step_times(table, columns)) for columns in (parted.since, parted.before))
    ratio = throughput_loss(now, then)
    return Cost(ratio, ratio, now, then)


def _spell_of(table: StepTable, parted: _Parted, policy: Policy) -> Spell:
    """Return the stretch since they are slow, of the one that became slower by most."""
    own = table.get("own").astype(float)
    worst = max(parted.slow, key=lambda row: float(parted.rises[row]))
    size = float(parted.rises[worst])
    rose = np.log(own[worst, parted.since] / middle(own[worst, parted.before]))
    return Spell(
        view="own",
        row=worst,
        first=int(parted.since[0]),
        last=int(parted.since[-1]),
        ended=False,
        size=size,
        consistent=float(np.mean(rose > size / 2)),
        strength=size / policy.ln_entry_floor,
    )
