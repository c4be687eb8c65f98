"""Ranks that are slow again and again, and ranks that are so in turn.

Of one rank each stretch alone is over soon, or costs much for a short time: its stretches are one
finding, what they cost is said of the whole time since the first one, and between two of them the
rank is not well again. Where it is another rank each time no rank is slow: work moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rankscope_server.diagnose.straggler.case import Case, Recurrence, name_of
from rankscope_server.diagnose.straggler.events import seconds_of
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.policy import Policy
from rankscope_server.findings.severity import severity_of_cost
from rankscope_server.observe.deviation import Deviation


def joined(window: Window, cases: Sequence[Case]) -> list[Case]:
    """Return the cases, those in which the same ranks are about as slow again as one."""
    by_name: dict[str, list[Case]] = {}
    for case in cases:
        by_name.setdefault(name_of(case), []).append(case)
    found: list[Case] = []
    for same in by_name.values():
        stretches = _alike(same, window.policy)
        if _is_pattern(stretches, window.policy):
            found.append(_one(window, stretches))
            found += [case for case in same if case not in stretches]
        else:
            found += same
    return [_still_open(window, case) for case in found]


def in_turn(
    window: Window, deviation: Deviation, cases: Sequence[Case], stretches: Sequence[Case]
) -> list[Case]:
    """Return the cases, as info where half of a role was slow in turn, by their `stretches`.

    What they are given moves between them, such as samples of other lengths. One that is slow for
    much longer than any turn was is none of these.
    """
    ranks_of, policy = window.steps.ranks, window.policy
    found = list(cases)
    for rows in deviation.rows_by_role():
        role = {ranks_of[row] for row in rows}
        turns = [
            case
            for case in stretches
            if case.ended_step is not None and case.severity != "info" and role >= {*case.ranks}
        ]
        had = {rank for case in turns for rank in case.ranks}
        least = max(policy.recurring_least, policy.turns_share * len(role))
        if len(had) < least or len(turns) < policy.recurring_least:
            continue
        longest = policy.turns_longest * max(_num_columns(case) for case in turns)
        found = [
            replace(case, severity="info")
            if role >= {*case.ranks} and _num_columns(case) < longest
            else case
            for case in found
        ]
    return found


def _num_columns(case: Case) -> int:
    columns: int = case.columns.stop - case.columns.start
    return columns


def _still_open(window: Window, case: Case) -> Case:
    """Return the case as open where it had pauses before that are as long as the one now."""
    table, policy = window.steps, window.policy
    has_pauses = case.episode.consistent < policy.consistent_share
    is_near = table.num_steps - case.columns.stop <= policy.long_window
    is_pause = case.recurrence is None and case.ended_step is not None and has_pauses and is_near
    return replace(case, ended_step=None) if is_pause else case


def _alike(cases: Sequence[Case], policy: Policy) -> list[Case]:
    """Return those that are about as bad as the costliest, in their order of time."""
    size = max(cases, key=lambda case: case.cost.sure * case.seconds).episode.size
    share = policy.same_size_share
    alike = [
        case
        for case in cases
        if share * size <= case.episode.size and share * case.episode.size <= size
    ]
    return sorted(alike, key=lambda case: case.columns.start)


def _is_pattern(cases: Sequence[Case], policy: Policy) -> bool:
    """Return whether they recur: two are chance, unless each would be accused alone.

    Where one of them is most of the time it is what there is to say.
    """
    seconds = [case.seconds for case in cases]
    is_often = len(cases) >= policy.recurring_least or (
        len(cases) > 1 and all(case.is_lasting for case in cases)
    )
    return is_often and max(seconds) <= policy.recurring_most_share * sum(seconds)


def _one(window: Window, cases: Sequence[Case]) -> Case:
    """Return the case of all stretches: open while they cost enough of the newest steps."""
    table, policy = window.steps, window.policy
    first, last = cases[0], cases[-1]
    newest = slice(max(0, table.num_steps - policy.recurring_steps), table.num_steps)
    is_open = last.ended_step is None or (_lost(window, cases, newest)[0] >= policy.cost_info_ratio)
    span = slice(first.columns.start, table.num_steps if is_open else last.columns.stop)
    ratio, sure = _lost(window, cases, span)
    covered = sum(case.columns.stop - case.columns.start for case in cases)
    worst = max(
        cases, key=lambda case: (case.ended_step is None, case.is_lasting, case.columns.stop)
    )
    is_lasting = any(case.is_lasting for case in cases)
    is_fault = any(case.severity != "info" for case in cases)
    return replace(
        worst,
        onset_step=first.onset_step,
        ended_step=None if is_open else last.ended_step,
        is_lasting=is_lasting,
        severity=severity_of_cost(sure, policy) if is_lasting and is_fault else "info",
        recurrence=Recurrence(len(cases), covered / (span.stop - span.start), ratio),
    )


def _lost(window: Window, cases: Sequence[Case], span: slice) -> tuple[float, float]:
    """Return which share of the time of some columns stretches cost, and what of it is sure."""
    whole = seconds_of(window.steps, span)
    parts = [
        slice(max(case.columns.start, span.start), min(case.columns.stop, span.stop))
        for case in cases
    ]
    weights = np.array([
        seconds_of(window.steps, part) / whole if part.start < part.stop else 0.0 for part in parts
    ])  # fmt: skip
    ratios = np.array([(case.cost.ratio, case.cost.sure) for case in cases])
    ratio, sure = weights @ ratios
    return float(ratio), float(sure)
