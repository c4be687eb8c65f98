"""Ranks that run on something else than the others: versions, variables, hardware."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from rankscope_server.diagnose.environment.words import finding_of
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import (
    NOT_HERE,
    SEVERITIES,
    DetectorResult,
    Severity,
    ran,
    skipped,
)
from rankscope_server.observe.environment_rules import (
    Kind,
    is_near,
    is_variable,
    kind_of,
    level_of,
    normal,
)
from rankscope_server.observe.environment_table import EnvironmentTable

NOT_SET = "not set"
_NOT_FOUND_OUT = "unknown"
_POLICY_RANKS = 3  # that follow one rule before another rank can break it
_MAX_FINDINGS = 16
_JOB_FACTS = {"commit": "code", "config": "model configuration", "dataset": "data set"}
_PER_NODE = "command.hash"  # what a person types on each node
_OF_PROGRAM = ("code.", "command.")
_ACCUSED_BY = frozenset({"straggler", "hang", "root-cause"})


@dataclass(frozen=True, slots=True)
class Difference:
    """One fact on which ranks differ. `ranks` is the minority, empty where there is none."""

    fact: str
    kind: Kind
    severity: Severity
    ranks: tuple[int, ...]
    values: tuple[tuple[str, tuple[int, ...]], ...]  # most ranks first
    p_trouble: float | None = None  # Fisher's p that the minority are those in trouble by chance


class Drift:
    """Finds ranks whose versions, environment or hardware differ from those of the others."""

    name: ClassVar[str] = "drift"
    kinds: ClassVar[tuple[str, ...]] = ("version_drift", "drift")
    needs: ClassVar[frozenset[str]] = frozenset({"environment"})

    def look(self, window: Window) -> DetectorResult:
        """Return which ranks differ on what should be the same."""
        table, world = window.facts.environments, window.world_size
        known = [rank for rank in table.records if rank >= 0]
        if world < 2:
            return skipped(self, "one rank has nobody to be compared with", NOT_HERE)
        if len(known) < max(2, (1 - window.policy.max_missing_share) * world):
            return skipped(
                self, f"snapshots of {len(known)} of {world} ranks", "attach the agent to all ranks"
            )
        found = differences(table, _places(window))
        found = [_raised(window, one, known) for one in found]
        by_story: dict[tuple[tuple[int, ...], str], list[Difference]] = defaultdict(list)
        for one in found:
            by_story[one.ranks, "" if one.ranks else one.fact].append(one)
        stories = sorted(by_story.values(), key=lambda story: SEVERITIES.index(_worst(story)))
        findings = [finding_of(window, story, len(known)) for story in stories[:_MAX_FINDINGS]]
        equal = sum(len(values) == 1 for values in table.by_fact.values())
        loud = any(finding.severity != "info" for finding in findings)
        checked = () if loud else (f"environment: {len(known)} ranks agree on {equal} facts",)
        return ran(self, findings, checked, _not_compared(table))


def _not_compared(table: EnvironmentTable) -> str:
    """Return which facts no rank tells: what is not compared is not equal."""
    names = " ".join(table.by_fact)
    missing = [words for part, words in _JOB_FACTS.items() if part not in names]
    return f"not compared, because no rank tells it: {', '.join(missing)}" if missing else ""


def _worst(story: Sequence[Difference]) -> Severity:
    return min((one.severity for one in story), key=SEVERITIES.index)


def _places(window: Window) -> dict[int, tuple[str, int]]:
    return {rank: (known.host, known.local_rank) for rank, known in window.ranks.items()}


def differences(table: EnvironmentTable, places: Mapping[int, tuple[str, int]]) -> list[Difference]:
    """Return the facts on which ranks differ; `places` is (host, local rank) by rank.

    Hardware is compared within one GPU model: of two kinds of machine neither drifts. Code and
    command are compared within one script: a parameter server runs another than its workers.
    """
    ranks = sorted(rank for rank in table.records if rank >= 0)
    models, scripts = (_by_fact(table, ranks, name) for name in ("gpu.model", "code.script"))
    found = []
    for fact, values in table.by_fact.items():
        is_total = len(values) == 1 and len(next(iter(values.values()))) == len(ranks)
        if is_total or (len(values) == 1 and not is_variable(fact)):
            continue  # all ranks agree, or those that know
        if level_of(fact) == "own":
            continue
        hardware = kind_of(fact) == "hardware" and fact != "gpu.model" and len(models) > 1
        alike = models if hardware else scripts if fact.startswith(_OF_PROGRAM) else {"": ranks}
        for among in alike.values():
            one = _difference(fact, values, among, places)
            # Lightning and Ray give each of their workers words of its own
            if one is not None and (fact != _PER_NODE or _is_by_node(one, places)):
                found.append(one)
    return found


def _by_fact(table: EnvironmentTable, ranks: Sequence[int], name: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        found[table.fact(rank, name)].append(rank)
    return found


def _difference(
    fact: str,
    values: Mapping[str, set[int]],
    among: Sequence[int],
    places: Mapping[int, tuple[str, int]],
) -> Difference | None:
    """Return in what the ranks `among` differ on one fact, None where they do not."""
    classes: dict[str, set[int]] = defaultdict(set)
    wanted = set(among)
    for value, ranks in values.items():
        if ranks & wanted and value != _NOT_FOUND_OUT:
            classes[normal(fact, value)] |= ranks & wanted
    unset = wanted.difference(*classes.values())
    if unset and is_variable(fact):
        classes[NOT_SET] |= unset
    ordered = sorted(classes.items(), key=lambda item: (-len(item[1]), item[0]))
    if len(ordered) < 2:
        return None
    first, most = ordered[0]
    for value, ranks in ordered[1:]:
        if is_near(fact, first, value):
            most |= ranks
            del classes[value]
    ordered = sorted(classes.items(), key=lambda item: (-len(item[1]), item[0]))
    if len(ordered) < 2:
        return None
    count = sum(len(ranks) for _, ranks in ordered)
    has_majority = 2 * len(ordered[0][1]) > count
    if fact == "torch.seed" and not has_majority:
        return _odd_seed(ordered)  # one for each stage, shard or rank: a policy
    level = level_of(fact, tuple(value for value, _ in ordered))
    if level == "own" or (level != "critical" and _is_by_place(ordered, places)):
        return None
    minority = sorted(set().union(*(ranks for _, ranks in ordered[1:])))
    return Difference(
        fact,
        kind_of(fact),
        level,
        tuple(minority) if has_majority else (),
        tuple((value, tuple(sorted(ranks))) for value, ranks in ordered),
    )


def _odd_seed(classes: Sequence[tuple[str, set[int]]]) -> Difference | None:
    """Return the ranks that break a policy of a seed and the rank's number; None without one."""
    by_base: dict[int, set[int]] = defaultdict(set)
    for value, ranks in classes:
        if not value.isdigit():
            return None
        for rank in ranks:
            by_base[int(value) - rank].add(rank)
    ordered = sorted(by_base.values(), key=len, reverse=True)
    count = sum(map(len, ordered))
    if len(ordered) < 2 or len(ordered[0]) < _POLICY_RANKS or 4 * len(ordered[0]) < 3 * count:
        return None
    odd = tuple(sorted(set().union(*ordered[1:])))
    bases = sorted(by_base.items(), key=lambda item: (-len(item[1]), item[0]))
    told = tuple((f"{base} + its rank", tuple(sorted(ranks))) for base, ranks in bases)
    return Difference("torch.seed", "job", "warning", odd, told)


def _is_by_node(one: Difference, places: Mapping[int, tuple[str, int]]) -> bool:
    """Return whether all ranks of a node agree: else a node was started in another way."""
    hosts = [{places[rank][0] for rank in ranks if rank in places} for _, ranks in one.values]
    return sum(map(len, hosts)) == len(set().union(*hosts))


def _is_by_place(
    classes: Sequence[tuple[str, set[int]]], places: Mapping[int, tuple[str, int]]
) -> bool:
    """Return whether a value goes with the rank, the host or the local rank by design.

    By design: about every rank, or about every host, has its own value; or the local rank alone
    decides it, the same way on at least two hosts.
    """
    ranks = set().union(*(members for _, members in classes))
    if len(ranks) > 2 and 2 * len(classes) > len(ranks):
        return True
    hosts = {places[rank][0] for rank in ranks if rank in places}
    values_of: dict[str, set[str]] = defaultdict(set)
    by_local: dict[int, set[str]] = defaultdict(set)
    for value, members in classes:
        for rank in members:
            if rank not in places:
                return False
            host, local = places[rank]
            values_of[host].add(value)
            by_local[local].add(value)
    by_host = all(len(values) == 1 for values in values_of.values())
    if by_host and len(hosts) > 2 and 2 * len(classes) > len(hosts):
        return True
    return len(hosts) > 1 and len(by_local) > 1 and all(len(v) == 1 for v in by_local.values())


def _raised(window: Window, one: Difference, known: Sequence[int]) -> Difference:
    """Raise a difference by one level if its minority are the ranks that are in trouble."""
    troubled = {
        rank
        for finding in window.before.values()
        if finding.detector in _ACCUSED_BY and finding.severity != "info"
        for rank in finding.ranks
    } & set(known)
    minority = set(one.ranks)
    if not troubled or not minority:
        return one
    p = fisher_p(len(known), len(minority), len(troubled), len(minority & troubled))
    if p >= window.policy.drift_fisher_p:
        return one
    level = SEVERITIES.index(one.severity)
    return replace(one, severity=SEVERITIES[max(0, level - 1)], p_trouble=p)


def fisher_p(total: int, marked: int, drawn: int, both: int) -> float:
    """Return the chance that at least `both` of `drawn` are among the `marked` of `total`.

    Fisher's exact test, one-sided (R. A. Fisher 1935): the tail of the hypergeometric law.
    """
    all_ways = math.comb(total, drawn)
    ways = sum(
        math.comb(marked, hits) * math.comb(total - marked, drawn - hits)
        for hits in range(both, min(marked, drawn) + 1)
    )
    return ways / all_ways
