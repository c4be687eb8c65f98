"""Copies of the parameters that should be equal bit for bit, and are not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

import numpy as np

from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import (
    NOT_HERE,
    DetectorResult,
    Evidence,
    Finding,
    ran,
    skipped,
)
from rankscope_server.findings.statistics import median
from rankscope_server.findings.text import ranks_text

_NUMBER = "replica_checksum"
_MAX_FINDINGS = 16
_Group: TypeAlias = tuple[str, int, str]  # role, stage, name of the group


@dataclass(frozen=True, slots=True)
class DriftedReplicas:
    """Ranks of one set of replicas that do not agree; `ranks` is empty where none is in the
    minority."""

    members: tuple[int, ...]
    ranks: tuple[int, ...]
    steps: tuple[int, ...]  # checks at which they differed
    is_open: bool  # they differed at the newest check


class Replicas:
    """Finds replicas of a model whose parameters are not the same bits any more."""

    name: ClassVar[str] = "replicas"
    finds: ClassVar[str] = (
        "Copies of the parameters that are not the same bits any more, or no longer updated"
    )
    needs: ClassVar[str] = "checksums under DistributedDataParallel; states of four ranks"
    silent: ClassVar[str] = "parameters are sharded; two replicas differ: no rank is named"

    def look(self, window: Window) -> DetectorResult:
        """Return which ranks drifted apart."""
        if window.world_size < 2:
            return skipped(self, "one rank has no replica", NOT_HERE)
        idle = skipped_updates(window)
        checks = checks_of(window)
        if not checks and idle:
            return ran(self, idle)
        if not checks:
            return skipped(
                self,
                "no checksum of replicas yet",
                "wait: they are taken of models under DistributedDataParallel, every "
                "`replica_check_steps` steps; sharded parameters have no replicas",
            )
        odd = drifted(checks, replica_sets(window, checks))
        findings = _with_memory(
            window, [_finding(window, replica) for replica in odd[:_MAX_FINDINGS]]
        )
        findings = [*idle, *findings]
        checked = () if findings else (f"replicas: equal bits at {len(checks)} checks",)
        return ran(self, findings, checked)


def checks_of(window: Window) -> dict[int, dict[int, float]]:
    """Return the checksums by step and rank."""
    numbers = window.facts.numbers
    ranks = numbers.ranks
    found = {}
    for step in numbers.steps(_NUMBER):
        column = numbers.column(_NUMBER, step)
        known = np.flatnonzero(~np.isnan(column))
        found[step] = {ranks[row]: float(column[row]) for row in known}
    return found


def replica_sets(window: Window, checks: Mapping[int, Mapping[int, float]]) -> list[frozenset[int]]:
    """Return the sets of ranks that hold the same parameters.

    All ranks of a pipeline stage, if most of them agree at the first check. Else, as under
    tensor parallelism, a family of process groups of one size that covers the role without
    overlap, if each of its groups agreed then; a family whose groups differ separates them.
    """
    by_role: dict[object, set[int]] = defaultdict(set)
    groups = {frozenset(ranks) for ranks in window.groups.values() if len(ranks) > 1}
    everyone = set().union(*(set(values) for values in checks.values()))
    if window.ranks:  # whose replica a rank is that never registered is not known
        everyone &= set(window.ranks)
    for rank in everyone:
        known = window.ranks.get(rank)
        by_role[(known.role, known.stage) if known else ""].add(rank)
    silent = set().union(*groups, set()) - everyone
    found: list[frozenset[int]] = []
    for role in by_role.values():
        first = next(
            (values for values in checks.values() if role <= set(values)),
            max(checks.values(), key=len),
        )
        found += _sets_of(role, first, groups, silent)
    return found


def _sets_of(
    role: set[int], first: Mapping[int, float], groups: set[frozenset[int]], silent: set[int]
) -> list[frozenset[int]]:
    """Return the sets within a role; of `silent` ranks no checksum is known."""
    if _largest_class(role, first) * 2 > len(role) + len(silent):
        return [frozenset(role)]
    inside = sorted((group for group in groups if group - silent < role), key=len, reverse=True)
    for size in dict.fromkeys(len(group) for group in inside):
        family = [group - silent for group in inside if len(group) == size and group - silent]
        # several axes of a mesh have groups of one size: take those that agree within
        agreeing = [
            group for group in family if _largest_class(group, first) == len(group & set(first))
        ]
        if sum(map(len, agreeing)) == len(role) and len(frozenset().union(*agreeing)) == len(role):
            return agreeing
    return [] if silent or not role <= set(first) else [frozenset(role)]


def _largest_class(ranks: set[int] | frozenset[int], values: Mapping[int, float]) -> int:
    sizes: dict[float, int] = defaultdict(int)
    for rank in ranks:
        if rank in values:
            sizes[values[rank]] += 1
    return max(sizes.values(), default=0)


def drifted(
    checks: Mapping[int, Mapping[int, float]], sets: Sequence[frozenset[int]]
) -> list[DriftedReplicas]:
    """Return the ranks in the minority of their set, or that the set has no majority."""
    found = []
    for members in sets:
        steps_of: dict[int | None, list[int]] = defaultdict(list)
        last = -1
        for step, values in checks.items():
            known = {rank: values[rank] for rank in members if rank in values}
            if len(known) < 2:
                continue
            last = max(last, step)
            by_value: dict[float, list[int]] = defaultdict(list)
            for rank, value in known.items():
                by_value[value].append(rank)
            if len(by_value) == 1:
                continue
            most = max(by_value.values(), key=len)
            if 2 * len(most) > len(known):
                for rank in set(known) - set(most):
                    steps_of[rank].append(step)
            else:
                steps_of[None].append(step)
        found += _odd(members, steps_of, last)
    return found


def _odd(
    members: frozenset[int], steps_of: Mapping[int | None, list[int]], last: int
) -> list[DriftedReplicas]:
    """Return one entry for ranks that differed at the same checks."""
    together: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, steps in steps_of.items():
        if rank is not None:
            together[tuple(steps)].append(rank)
    everyone = tuple(sorted(members))
    found = [
        DriftedReplicas(everyone, tuple(sorted(ranks)), steps, steps[-1] == last)
        for steps, ranks in together.items()
    ]
    undecided = tuple(steps_of.get(None, ()))
    if undecided and not found:
        found.append(DriftedReplicas(everyone, (), undecided, undecided[-1] == last))
    return sorted(found, key=lambda one: one.steps[0])


def _finding(window: Window, replicas: DriftedReplicas) -> Finding:
    first, last = replicas.steps[0], replicas.steps[-1]
    count, who = len(replicas.steps), replicas.ranks or replicas.members
    named = bool(replicas.ranks)
    others = len(replicas.members) - len(replicas.ranks)
    hosts = window.hosts(replicas.ranks)
    tag, is_one = "+".join(str(rank) for rank in who[:8]), len(replicas.ranks) == 1
    what = (
        f"{window.who(replicas.ranks)} no longer {'holds' if is_one else 'hold'} the parameters of "
        f"{'its' if is_one else 'their'} {others} replicas"
        if named
        else f"The replicas on {ranks_text(replicas.members)} no longer hold the same parameters"
    )
    since = f"since step {first:,}" if replicas.is_open else f"from step {first:,} to step {last:,}"
    confidence = 0.95 if named and count > 1 else 0.85 if named else 0.7
    steps = " and ".join(f"{step:,}" for step in replicas.steps[:3]) + " ..." * (count > 3)
    minority = "in the minority" if named else "no value has a majority"
    return window.finding(
        "replica_drift",
        tag,
        is_over=not replicas.is_open,
        ranks=replicas.ranks,
        hosts=hosts,
        onset_step=first,
        ended_step=None if replicas.is_open else last,
        what=f"{what} {since}",
        why=f"The checksum over the bits of all parameters is {minority} at {count} "
        f"check{'s' * (count > 1)} (step{'s' * (count > 1)} {steps}); equal replicas have equal "
        "bits, there is no tolerance in it",
        next=f"Stop, restore {ranks_text(who)} from a replica or from a checkpoint saved before "
        f"step {first:,}, then test memory and matrix products"
        f"{' on ' + hosts[0] if len(hosts) == 1 else ' on these hosts'}; each checkpoint since "
        "then may hold the damage",
        command="rankscope doctor",
        confidence=(
            confidence,
            (
                "exact comparison, a majority agrees"
                if named
                else "exact comparison, but no majority says who is right"
            )
            + (f", at {count} checks" if count > 1 else ", at one check so far"),
        ),
        evidence=tuple(
            Evidence(f"Step {step:,}: {minority}", window.link(who[0], step))
            for step in replicas.steps[:4]
        ),
        ruled_out=("Rounding: the sum is over bits read as integers, in any order the same",),
        disproof="These ranks are not replicas of each other, or hold parameters that "
        "are meant to differ",
    )


def _with_memory(window: Window, findings: list[Finding]) -> list[Finding]:
    """Keep the onset of a drift whose first check is not kept any more."""
    kept = []
    for finding in findings:
        old = window.before.get(finding.key)
        if old is not None and (old.onset_step or 0) < (finding.onset_step or 0):
            what = finding.what.replace(
                f"since step {finding.onset_step:,}", f"since step {old.onset_step:,}"
            )
            finding = replace(finding, onset_step=old.onset_step, onset_ms=old.onset_ms, what=what)
        kept.append(finding)
    return kept


def skipped_updates(window: Window) -> list[Finding]:
    """Return one finding for each rank whose steps do not end though its collectives go on.

    A step ends with the optimizer. A rank that calls the same collectives as its group while its
    step does not end leaves its updates out: its copy of the weights stays behind, checked or not.
    One that the others train on without calls nothing, and they count anew.
    """
    lost = window.facts.regroups.are_without
    states = {rank: state for rank, state in window.states.items() if not lost(rank)}
    if len(states) < window.policy.min_role_size:
        return []
    newest, most = max(s.step for s in states.values()), window.policy.skipped_update_steps
    behind = [rank for rank, state in states.items() if newest - state.step > most]
    if not behind or 2 * len(behind) >= len(states):
        return []
    calls = _calls_of(window, set(states) - set(behind))
    return [
        _skipped_finding(window, rank, newest)
        for rank in sorted(behind)
        if _goes_along(window, rank, calls)
    ]


def _calls_of(window: Window, ranks: Iterable[int]) -> dict[_Group, set[tuple[int, float]]]:
    """Return how many calls ranks of each role made in their groups, and how near is as many.

    Most ranks of a role made equally many: a thousand of them are a few pairs of numbers.
    """
    found: dict[_Group, set[tuple[int, float]]] = defaultdict(set)
    for rank in ranks:
        known, state = window.ranks.get(rank), window.states[rank]
        if known is None:
            continue
        per_step = max((group.issued for group in state.groups), default=0) / max(state.step, 1)
        for group in state.groups:
            if group.issued > window.policy.skipped_update_steps * per_step:
                found[known.role, known.stage, group.group].add(
                    (group.issued, max(2.0, 2 * per_step))
                )
    return found


def _goes_along(window: Window, rank: int, calls: Mapping[_Group, set[tuple[int, float]]]) -> bool:
    """Return whether a rank made as many calls in a group as another one of its role."""
    known = window.ranks.get(rank)
    return known is not None and any(
        group.issued and abs(group.issued - issued) <= near
        for group in window.states[rank].groups
        for issued, near in calls.get((known.role, known.stage, group.group), ())
    )


def _skipped_finding(window: Window, rank: int, newest: int) -> Finding:
    since = window.states[rank].step
    who = window.who((rank,))
    confidence = 0.85
    usual = median(window.steps.get("duration"), 1) if window.steps.num_steps else None
    pace = "" if usual is None or not len(usual) else f", {newest - since:,} steps by now"
    return window.finding(
        "replica_drift",
        f"updates/{rank}",
        ranks=(rank,),
        onset_step=since,
        confidence=(confidence, "its collectives are counted, and no optimizer step"),
        what=f"{who} has not updated its weights since step {since:,}; the others are in step "
        f"{newest:,}",
        why=f"It calls the collectives that the others call{pace}, and its optimizer takes no "
        "step: its weights stay as they were while it adds its gradients to theirs",
        next=f"Find the condition under which rank {rank} leaves optimizer.step() out; restart it "
        "from a checkpoint of another replica",
        evidence=(Evidence(f"Rank {rank}, its last step", window.link(rank, since)),),
        ruled_out=("A rank that hangs: it calls what the others call",),
        disproof=f"Rank {rank} has no optimizer by design, or calls rankscope.step() more rarely",
    )
