"""Which NIC, host, leaf or pod makes groups slow: pure functions over transfer times.

A transfer time is the duration of the last arriver on its own clock. What is needed of the
topology is which groups cross which component.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from rankscope.wire.formulas import SIGMA_PER_MAD
from rankscope_server.findings.policy import POLICY, Policy

Group = TypeVar("Group", bound=Hashable)
Component = TypeVar("Component", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Slow:
    """A component whose groups are slow. `crossing` of its groups were measured."""

    component: Hashable
    f1: float
    slow: int
    crossing: int
    ratio: float  # median of its groups' time over that of their kind


@dataclass(frozen=True, slots=True)
class Located:
    """Components found, and slow groups that none of them explains."""

    found: tuple[Slow, ...]
    unexplained: tuple[Hashable, ...]
    why_silent: str = ""


def ratios(
    times: Mapping[Group, Sequence[float]],
    kinds: Mapping[Group, Hashable],
    policy: Policy = POLICY,
) -> dict[Group, float]:
    """Return ln(median time / median of its kind) for each group with enough operations.

    The first operation is warm-up, often twice as slow on all ranks, and is left out.
    """
    medians = {
        group: float(np.median(np.log(np.asarray(values, float)[1:])))
        for group, values in times.items()
        if len(values) > policy.link_min_operations
    }
    by_kind: dict[Hashable, list[float]] = defaultdict(list)
    for group, value in medians.items():
        by_kind[kinds[group]].append(value)
    centre = {kind: float(np.median(values)) for kind, values in by_kind.items()}
    return {
        group: value - centre[kinds[group]]
        for group, value in medians.items()
        if len(by_kind[kinds[group]]) >= policy.min_role_size
    }


def slow_groups(
    found: Mapping[Group, float], kinds: Mapping[Group, Hashable], policy: Policy = POLICY
) -> set[Group]:
    """Return the groups above max(ln 1.15, 6 sigma of the groups of their kind)."""
    by_kind: dict[Hashable, list[float]] = defaultdict(list)
    for group, value in found.items():
        by_kind[kinds[group]].append(value)
    limit = {
        kind: max(
            policy.ln_link_floor,
            policy.link_sigmas * SIGMA_PER_MAD * float(np.median(np.abs(values))),
        )
        for kind, values in by_kind.items()
    }
    return {group for group, value in found.items() if value > limit[kinds[group]]}


def locate(
    found: Mapping[Group, float],
    slow: set[Group],
    crossed_by: Mapping[Component, set[Group]],
    size_of: Mapping[Component, int],
    kinds: Mapping[Group, Hashable],
    policy: Policy = POLICY,
) -> Located:
    """Return the components whose groups are the slow ones, best first.

    F1 of {groups that cross a component} against the slow groups; the smaller component wins ties.
    Of two components of one size that fit alike neither is named. A kind of
    which most groups cross a component says nothing of it: their median is slow, too.
    """
    if not slow:
        return Located((), ())
    if len(slow) > policy.link_global_share * len(found):
        return Located((), tuple(slow), "more than half of all groups are slow: no single place")
    left = set(slow)
    known, total = set(found), Counter(kinds[group] for group in found)
    telling = {
        component: _telling(groups & known, total, kinds)
        for component, groups in crossed_by.items()
    }
    taken: set[Group] = set()
    result: list[Slow] = []
    while left:
        scored = []
        for component, groups in telling.items():
            crossing = groups - taken
            if len(crossing) < policy.link_min_groups or not crossing & left:
                continue
            hits = len(crossing & left)
            scored.append((2 * hits / (len(crossing) + len(left)), -size_of[component], component))
        if not scored:
            break
        f1, negative_size, component = max(scored, key=lambda one: one[:2])
        rivals = [one for one in scored if one[0] == f1 and one[1] == negative_size]
        if f1 < policy.link_min_f1 or len(rivals) > 1:
            break
        crossing = telling[component] - taken
        hits_of = crossing & left
        ratio = float(np.exp(np.median([found[group] for group in hits_of])))
        result.append(Slow(component, f1, len(hits_of), len(crossing), ratio))
        left -= crossing
        taken |= crossing
    why = "" if not left else "communication is slow, but these groups do not show where"
    return Located(tuple(result), tuple(left), why)


def _telling(
    crossing: set[Group], total: Mapping[Hashable, int], kinds: Mapping[Group, Hashable]
) -> set[Group]:
    """Return the groups of those kinds of which at most half cross."""
    count = Counter(kinds[group] for group in crossing)
    return {group for group in crossing if 2 * count[kinds[group]] <= total[kinds[group]]}
