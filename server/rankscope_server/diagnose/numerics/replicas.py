"""Copies of the parameters that should be equal bit for bit, and are not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from rankscope_server.diagnose.numerics.skipped_updates import skipped_updates
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import (
    NOT_HERE,
    DetectorResult,
    Evidence,
    Finding,
    ran,
    skipped,
)
from rankscope_server.findings.text import capital, place_text, ranks_text

_NUMBER = "replica_checksum"
_MAX_FINDINGS = 16


@dataclass(frozen=True, slots=True)
class Odd:
    """Ranks of one set of replicas that do not agree; `ranks` is empty where none is in the
    minority."""

    members: tuple[int, ...]
    ranks: tuple[int, ...]
    steps: tuple[int, ...]  # checks at which they differed
    is_open: bool  # they differed at the newest check


class Replicas:
    """Finds replicas of a model whose parameters are not the same bits any more."""

    name: ClassVar[str] = "replicas"
    kinds: ClassVar[tuple[str, ...]] = ("replica_drift",)
    needs: ClassVar[frozenset[str]] = frozenset({"metrics"})

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
        findings = _with_memory(window, [_finding(window, one) for one in odd[:_MAX_FINDINGS]])
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
    overlap, if each of its groups agreed then; a family whose groups differ tells them apart.
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


def drifted(checks: Mapping[int, Mapping[int, float]], sets: Sequence[frozenset[int]]) -> list[Odd]:
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


def _odd(members: frozenset[int], steps_of: Mapping[int | None, list[int]], last: int) -> list[Odd]:
    """Return one entry for ranks that differed at the same checks."""
    together: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, steps in steps_of.items():
        if rank is not None:
            together[tuple(steps)].append(rank)
    everyone = tuple(sorted(members))
    found = [
        Odd(everyone, tuple(sorted(ranks)), steps, steps[-1] == last)
        for steps, ranks in together.items()
    ]
    undecided = tuple(steps_of.get(None, ()))
    if undecided and not found:
        found.append(Odd(everyone, (), undecided, undecided[-1] == last))
    return sorted(found, key=lambda one: one.steps[0])


def _finding(window: Window, one: Odd) -> Finding:
    first, last = one.steps[0], one.steps[-1]
    count, who = len(one.steps), one.ranks or one.members
    named = bool(one.ranks)
    others = len(one.members) - len(one.ranks)
    hosts = window.hosts(one.ranks)
    tag = "+".join(str(rank) for rank in who[:8])
    what = (
        f"{capital(place_text(one.ranks, hosts))} no longer hold{'s' * (len(one.ranks) == 1)} the "
        f"parameters of {'its' if len(one.ranks) == 1 else 'their'} {others} replicas"
        if named
        else f"The replicas on {ranks_text(one.members)} no longer hold the same parameters"
    )
    since = f"since step {first:,}" if one.is_open else f"from step {first:,} to step {last:,}"
    confidence = 0.95 if named and count > 1 else 0.85 if named else 0.7
    steps = " and ".join(f"{step:,}" for step in one.steps[:3]) + " ..." * (count > 3)
    minority = "in the minority" if named else "no value has a majority"
    return Finding(
        key=f"{window.attempt}/replicas/{tag}",
        detector="replicas",
        kind="replica_drift",
        severity="critical",
        state="open" if one.is_open else "recovered",
        attempt=window.attempt,
        ranks=one.ranks,
        hosts=hosts,
        onset_step=first,
        onset_ms=window.time_ms(first),
        ended_step=None if one.is_open else last,
        what=f"{what} {since}",
        why=f"The checksum over the bits of all parameters is {minority} at {count} "
        f"check{'s' * (count > 1)} (step{'s' * (count > 1)} {steps}); equal replicas have equal "
        "bits, there is no tolerance in it",
        next=f"Stop, restore {ranks_text(who)} from a replica or from a checkpoint saved before "
        f"step {first:,}, then test memory and matrix products"
        f"{' on ' + hosts[0] if len(hosts) == 1 else ' on these hosts'}; each checkpoint since "
        "then may hold the damage",
        next_command="rankscope doctor",
        confidence=confidence,
        confidence_text=(
            "high: exact comparison, a majority agrees" if named
            else "medium: exact comparison, but no majority says who is right"
        ) + (f", at {count} checks" if count > 1 else ", at one check so far"),
        evidence=tuple(
            Evidence(f"Step {step:,}: {minority}", window.link(who[0], step))
            for step in one.steps[:4]
        ),
        ruled_out=("Rounding: the sum is over bits read as integers, in any order the same",),
        would_be_wrong_if="These ranks are not replicas of each other, or hold parameters that "
        "are meant to differ",
        policy_hash=window.policy.hash,
    )  # fmt: skip


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
