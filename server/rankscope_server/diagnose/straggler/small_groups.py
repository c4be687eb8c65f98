"""Slow ranks among two or three of a role, which were slow from the first steps on.

So few are compared with their own steps before: with two, nobody else says which of them is as it
should be. That tells nothing of a rank whose steps were never better, or whose first ones were
disturbed. But who is waited for is known: the others are done earlier, and wait for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope_server.diagnose.straggler.events import lasts, seconds_of
from rankscope_server.diagnose.straggler.words import Case
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.policy import Policy
from rankscope_server.findings.severity import severity_of
from rankscope_server.findings.statistics import median
from rankscope_server.observe.deviation import Deviation
from rankscope_server.observe.episodes import Spell, turning_point
from rankscope_server.observe.rank_cost import Cost, Excess, excess_between, middle, step_times
from rankscope_server.observe.step_table import StepTable

Array = NDArray[Any]
_WAITED_SHARE = 0.5  # of its excess, that each of the others waits


@dataclass(frozen=True, slots=True)
class _Group:
    """The ranks of one role: who is the slowest lately, and the columns that were looked at."""

    row: int
    others: list[int]
    columns: Array  # usual ones of which all its rows are known
    recent: Array  # the newest of these


def slow_from_start(window: Window, found: Deviation, named: Collection[int]) -> list[Case]:
    """Return the ranks of small roles that the others wait for, without the rows of `named`."""
    cases = []
    for rows in found.rows_by_role():
        if len(rows) < 2 or found.peers[rows].all():
            continue
        group = _group_of(window.steps, found, rows, window.policy)
        case = _case(window, group) if group is not None and group.row not in named else None
        if case is not None:
            cases.append(case)
    return cases


def is_outdone(table: StepTable, found: Deviation, spell: Spell, slow: Collection[int]) -> bool:
    """Return whether a rank with too few peers works no longer than another one of its role.

    It is compared with its own steps before, and may have become slower: the job waits for the
    other one all the same. The rows of `slow`, which have spells meanwhile, do not count.
    """
    if found.peers[spell.row]:
        return False
    own = table.get("own")[:, spell.columns]
    return any(
        role == found.roles[spell.row]
        and row not in slow
        and middle(own[row]) >= middle(own[spell.row])
        for row, role in enumerate(found.roles)
    )


def _group_of(table: StepTable, found: Deviation, rows: list[int], policy: Policy) -> _Group | None:
    own = table.get("own")[rows]
    usual = ~table.special() & table.seen() & ~np.isnan(own).any(axis=0)
    usual[: found.first_column] = False
    columns = np.flatnonzero(usual)
    if len(columns) < policy.huge_steps:
        return None
    recent = columns[-policy.recent_steps :]
    if not _do_alike(table, rows, recent):
        return None
    slowest = int(np.argmax(np.median(own[:, recent], axis=1)))
    return _Group(rows[slowest], [row for row in rows if row != rows[slowest]], columns, recent)


def _do_alike(table: StepTable, rows: list[int], columns: Array) -> bool:
    """Return whether all of them compute forwards and backwards, or none: else they differ by plan.

    An actor beside a learner, or a server of parameters, may have less to do for good.
    """
    there = (median(table.get(name)[rows][:, columns], 1) > 0 for name in ("forward", "backward"))
    return all(bool(one.all()) or not one.any() for one in there)


def _case(window: Window, group: _Group) -> Case | None:
    """Return what holds the others up; None if it is small, short, or nobody waits for it."""
    table, policy = window.steps, window.policy
    spell = _spell_of(table, group, policy)
    if spell is None:
        return None
    inside = group.columns[group.columns >= spell.first][-policy.cost_steps :]
    cost = _cost_of(table, group, inside)
    if not cost.ratio >= policy.cost_silent_ratio:
        return None
    excess = excess_between(
        lambda name: of_rows(table, name, [group.row], inside),
        lambda name: of_rows(table, name, group.others, inside),
    )
    rank = table.ranks[group.row]
    return open_case(
        window, (rank,), spell, excess, cost, len(group.others), has_peers=True,
        is_throughout=window.facts.is_recording and spell.first <= int(group.columns[0]),
    )  # fmt: skip


def of_each(table: StepTable, metric: str, rows: Sequence[int], columns: Array) -> Array:
    """Return the median of each row over columns, in ms."""
    each: Array = median(table.get(metric)[np.ix_(np.array(rows), columns)].astype(float), 1)
    return each


def of_rows(table: StepTable, metric: str, rows: Sequence[int], columns: Array) -> float:
    """Return the median over columns of the median row, in ms."""
    return middle(median(table.get(metric)[np.ix_(np.array(rows), columns)].astype(float), 0))


def open_case(
    window: Window,
    ranks: tuple[int, ...],
    spell: Spell,
    excess: Excess,
    cost: Cost,
    num_others: int,
    *,
    has_peers: bool,
    is_throughout: bool = False,
) -> Case:
    """Return the case of ranks that are slow now, by the worst one's spell, with no company."""
    table, policy = window.steps, window.policy
    is_lasting = lasts(table, spell, policy)
    is_data = excess.by_phase["data"] > 0.5 * excess.total_ms
    return Case(
        kind="slow_data" if is_data else "slow_compute",
        ranks=ranks,
        worst_rank=table.ranks[spell.row],
        spell=spell,
        columns=spell.columns,
        onset_step=int(table.steps[spell.first]),
        is_throughout=is_throughout,
        ended_step=None,
        seconds=seconds_of(table, spell.columns),
        is_lasting=is_lasting,
        has_peers=has_peers,
        num_peers=num_others,
        excess=excess,
        ratio=float(np.exp(spell.size)),
        cost=cost,
        company={},
        severity=severity_of(cost.sure, policy) if is_lasting else "info",
    )


def open_spell(row: int, columns: Array, raw: Array, size: float, policy: Policy) -> Spell:
    """Return the spell of a row over `columns`; `raw` is ln(work / reference) in each of them."""
    return Spell(
        view="own",
        row=row,
        first=int(columns[0]),
        last=int(columns[-1]),
        ended=False,
        size=size,
        consistent=float(np.mean(raw > size / 2)),
        strength=size / policy.ln_entry_floor,
    )


def _spell_of(table: StepTable, group: _Group, policy: Policy) -> Spell | None:
    """Return since when it is slower than the slowest other, by as much as it is lately."""
    own = table.get("own")
    others = own[group.others][:, group.columns].max(axis=0)
    with np.errstate(divide="ignore"):
        raw = np.log(own[group.row, group.columns] / others)
    size = middle(raw[-len(group.recent) :])
    if not np.log(policy.company_ratio) <= size < np.inf:
        return None
    first = turning_point(raw, 0.0, size)
    return open_spell(group.row, group.columns[first:], raw[first:], size, policy)


def _cost_of(table: StepTable, group: _Group, columns: Array) -> Cost:
    """Return what the others really waited, of what it is later than the slowest of them."""
    own = table.get("own")
    late = own[group.row, columns] - own[group.others][:, columns].max(axis=0)
    late = np.fmax(late.astype(float), 0.0)
    waited = table.get("blocked")[group.others][:, columns].min(axis=0).astype(float)
    step = step_times(table, columns)
    known = ~np.isnan(step) & ~np.isnan(waited)
    if not known.any() or middle(waited) < _WAITED_SHARE * middle(late):
        return Cost(0.0, 0.0, float("nan"), None)
    ratio = float(np.fmin(late, waited)[known].sum() / step[known].sum())
    return Cost(ratio, ratio, middle(step), None)
