"""Ranks that run on something else than the others: versions, variables, hardware."""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import (
    NOT_HERE,
    SEVERITIES,
    DetectorResult,
    Finding,
    Severity,
    ran,
    skipped,
)
from rankscope_server.findings.policy import POLICY, Policy
from rankscope_server.findings.text import cut, ranks_text
from rankscope_server.observe.environment_rules import (
    Kind,
    is_near,
    is_of_host,
    is_variable,
    kind_of,
    level_of,
    normal,
)
from rankscope_server.observe.environment_table import EnvironmentTable

NOT_SET = "not set"
_NOT_FOUND_OUT = "unknown"
_MAX_FINDINGS = 16
_JOB_FACTS = {"commit": "code", "config": "model configuration", "dataset": "data set"}
_PER_NODE = "command.hash"  # what a person types on each node
_OF_PROGRAM = ("code.", "command.")
_ACCUSED_BY = frozenset({"straggler", "hang", "root-cause"})
_MAX_EVIDENCE = 12
_COMMANDS = {
    "torch": 'python -c "import torch; print(torch.__version__, torch.__file__)"',
    "torch.git": 'python -c "import torch; print(torch.version.git_version, torch.__file__)"',
    "nccl": 'python -c "import torch; print(torch.cuda.nccl.version())"',
    "code.commit": "git log -1 --oneline; git status --short",
    "code.hash": "git diff --stat; sha256sum *.py",
    "torch.cuda": 'python -c "import torch; print(torch.version.cuda)"',
    "driver": "cat /proc/driver/nvidia/version",
    "kernel": "uname -r",
}


@dataclass(frozen=True, slots=True)
class FactDifference:
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
    finds: ClassVar[str] = (
        "Ranks whose versions, environment, hardware, code or settings differ from the others'"
    )
    needs: ClassVar[str] = "environment snapshots of 70 % of the ranks"
    silent: ClassVar[str] = "a value belongs to one rank, host or local rank by design"

    def look(self, window: Window) -> DetectorResult:
        """Return which ranks differ on what should be the same."""
        table, world = window.facts.environments, window.world_size
        known = [rank for rank in table.records if rank >= 0]
        if world < 2:
            return skipped(self, "one rank has no peer to be compared with", NOT_HERE)
        if len(known) < max(2, (1 - window.policy.max_missing_share) * world):
            return skipped(
                self, f"snapshots of {len(known)} of {world} ranks", "attach the agent to all ranks"
            )
        found = differences(table, _places(window), window.policy)
        found = [_raised(window, difference, known) for difference in found]
        by_incident: dict[tuple[tuple[int, ...], str], list[FactDifference]] = defaultdict(list)
        for difference in found:
            by_incident[difference.ranks, "" if difference.ranks else difference.fact].append(
                difference
            )
        incidents = sorted(
            by_incident.values(), key=lambda incident: SEVERITIES.index(_worst(incident))
        )
        findings = [
            finding_of(window, incident, len(known)) for incident in incidents[:_MAX_FINDINGS]
        ]
        equal = sum(len(values) == 1 for values in table.by_fact.values())
        loud = any(finding.severity != "info" for finding in findings)
        checked = () if loud else (f"environment: {len(known):,} ranks agree on {equal} facts",)
        return ran(self, findings, checked, _not_compared(table))


def _not_compared(table: EnvironmentTable) -> str:
    """Return which facts no rank reports: what is not compared is not equal."""
    names = " ".join(table.by_fact)
    missing = [words for part, words in _JOB_FACTS.items() if part not in names]
    return f"not compared, because no rank reports it: {', '.join(missing)}" if missing else ""


def _worst(incident: Sequence[FactDifference]) -> Severity:
    return min((difference.severity for difference in incident), key=SEVERITIES.index)


def _places(window: Window) -> dict[int, tuple[str, int]]:
    return {rank: (known.host, known.local_rank) for rank, known in window.ranks.items()}


def differences(
    table: EnvironmentTable, places: Mapping[int, tuple[str, int]], policy: Policy = POLICY
) -> list[FactDifference]:
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
            one = _difference(fact, values, among, places, policy)
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
    policy: Policy,
) -> FactDifference | None:
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
        return _odd_seed(ordered, policy)  # one for each stage, shard or rank: a policy
    level = level_of(fact, tuple(value for value, _ in ordered))
    is_name = is_of_host(fact) and _is_by_host(ordered, places)
    if level == "own" or is_name or (level != "critical" and _is_by_place(ordered, places)):
        return None
    minority = sorted(set().union(*(ranks for _, ranks in ordered[1:])))
    return FactDifference(
        fact,
        kind_of(fact),
        level,
        tuple(minority) if has_majority else (),
        tuple((value, tuple(sorted(ranks))) for value, ranks in ordered),
    )


def _odd_seed(classes: Sequence[tuple[str, set[int]]], policy: Policy) -> FactDifference | None:
    """Return the ranks that break a policy of a seed and the rank's number; None without one."""
    by_base: dict[int, set[int]] = defaultdict(set)
    for value, ranks in classes:
        if not value.isdigit():
            return None
        for rank in ranks:
            by_base[int(value) - rank].add(rank)
    ordered = sorted(by_base.values(), key=len, reverse=True)
    count = sum(map(len, ordered))
    least = max(policy.drift_rule_ranks, policy.drift_agreed_share * count)
    if len(ordered) < 2 or len(ordered[0]) < least:
        return None
    odd = tuple(sorted(set().union(*ordered[1:])))
    bases = sorted(by_base.items(), key=lambda item: (-len(item[1]), item[0]))
    values = tuple((f"{base} + its rank", tuple(sorted(ranks))) for base, ranks in bases)
    return FactDifference("torch.seed", "job", "warning", odd, values)


def _is_by_node(difference: FactDifference, places: Mapping[int, tuple[str, int]]) -> bool:
    """Return whether all ranks of a node agree: else a node was started in another way."""
    hosts = [
        {places[rank][0] for rank in ranks if rank in places} for _, ranks in difference.values
    ]
    return sum(map(len, hosts)) == len(set().union(*hosts))


def _is_by_place(
    classes: Sequence[tuple[str, set[int]]], places: Mapping[int, tuple[str, int]]
) -> bool:
    """Return whether a value belongs to the rank, the host or the local rank by design.

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


def _is_by_host(
    classes: Sequence[tuple[str, set[int]]], places: Mapping[int, tuple[str, int]]
) -> bool:
    """Return whether each host has one value, and no two hosts the same."""
    hosts = [{places[rank][0] for rank in ranks if rank in places} for _, ranks in classes]
    return all(len(one) == 1 for one in hosts) and len(set().union(*hosts)) == len(hosts)


def _raised(window: Window, difference: FactDifference, known: Sequence[int]) -> FactDifference:
    """Raise a difference by one level if its minority are the ranks that are in trouble."""
    troubled = {
        rank
        for finding in window.before.values()
        if finding.detector in _ACCUSED_BY and finding.severity != "info"
        for rank in finding.ranks
    } & set(known)
    minority = set(difference.ranks)
    if not troubled or not minority:
        return difference
    p = fisher_p(len(known), len(minority), len(troubled), len(minority & troubled))
    if p >= window.policy.drift_fisher_p:
        return difference
    level = SEVERITIES.index(difference.severity)
    return replace(difference, severity=SEVERITIES[max(0, level - 1)], p_trouble=p)


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


def finding_of(window: Window, incident: Sequence[FactDifference], num_known: int) -> Finding:
    """Return the finding on facts that the same ranks differ on, the worst fact first."""
    facts = sorted(incident, key=lambda one: (SEVERITIES.index(one.severity), one.fact))
    worst, ranks = facts[0], facts[0].ranks
    confidence, reason = _confidence(worst, num_known, window.policy)
    tag = zlib.crc32(repr(ranks or worst.fact).encode())
    return window.finding(
        "version_drift" if worst.kind in ("version", "environment") else "drift",
        f"{tag:08x}",
        severity=worst.severity,
        ranks=ranks,
        what=_what(window, worst, len(facts)),
        why=_why(facts, num_known),
        next=_next(window, worst),
        command=_command(window, worst),
        confidence=(confidence, reason),
        evidence=tuple(_fact_text(fact) for fact in facts[:_MAX_EVIDENCE]),
        ruled_out=("Values that belong to one rank, host or local rank by design were left out",),
        disproof="The difference is intended, for example a test of a new version",
    )


def _name(fact: str) -> str:
    return fact.removeprefix("env.")


def _what(window: Window, difference: FactDifference, count: int) -> str:
    more = f" and {count - 1} more facts" if count > 2 else " and one more fact" * (count == 2)
    others = difference.values[0][0]
    if not difference.ranks:
        sides = "; ".join(f"{ranks_text(ranks)}: {cut(value, 40)}" for value, ranks in
                          difference.values[:3])  # fmt: skip
        return f"Ranks differ on {_name(difference.fact)}{more}: {sides}"
    who = window.who(difference.ranks)
    verb = "has" if len(difference.ranks) == 1 else "have"
    values = [value for value, _ in difference.values[1:]]
    shown = cut(values[0], 60) if len(values) == 1 else f"{len(values)} other values"
    return f"{who} {verb} {_name(difference.fact)} {shown}{more}; the others {cut(others, 60)}"


def _why(facts: Sequence[FactDifference], num_known: int) -> str:
    worst = facts[0]
    text = f"{len(worst.values[0][1]):,} of {num_known:,} ranks agree on {_name(worst.fact)}"
    if len(facts) > 1:
        names = ", ".join(_name(fact.fact) for fact in facts[1:6])
        text += f"; the same ranks also differ on {names}"
        text += f" and {len(facts) - 6} more" * (len(facts) > 6)
    if worst.p_trouble is not None:
        p = "p < 0.001" if worst.p_trouble < 1e-3 else f"p = {worst.p_trouble:.3f}"
        text += f"; these are also the ranks that are slow or failed (Fisher {p})"
    return text


def _next(window: Window, difference: FactDifference) -> str:
    hosts = window.hosts(difference.ranks)
    where = f"on {hosts[0]}" if len(hosts) == 1 else f"on {len(hosts)} hosts" if hosts else ""
    where = where or "on all ranks"
    name = _name(difference.fact)
    if difference.kind == "version":
        return f"Install the same {name} {where} before the next start, best from one image"
    if difference.kind == "environment":
        return f"Set {name} alike {where} in the launch script before the next start"
    if difference.kind == "job":
        return f"Start all ranks from the same {name}: stop, copy code and configuration, start"
    return f"Check the hardware and its settings {where}, or give such machines a job of their own"


def _command(window: Window, difference: FactDifference) -> str:
    """Return what shows the fact where it differs; of a variable, as the process has it."""
    known = window.ranks.get(
        difference.ranks[0] if difference.ranks else difference.values[-1][1][0]
    )
    if known is not None and difference.fact.startswith("env."):
        return f"tr '\\0' '\\n' < /proc/{known.pid}/environ | grep ^{_name(difference.fact)}="
    if known is not None and difference.fact == "command.hash":
        return f"tr '\\0' ' ' < /proc/{known.pid}/cmdline"
    return _COMMANDS.get(difference.fact, "")


def _fact_text(difference: FactDifference) -> str:
    sides = "; ".join(
        f"{cut(value, 80)} on {ranks_text(ranks)}"
        for value, ranks in reversed(difference.values[:4])
    )
    return f"{_name(difference.fact)} ({difference.severity}): {sides}"


def _confidence(difference: FactDifference, num_known: int, policy: Policy) -> tuple[float, str]:
    """Return 0.6 for a tie, 0.8 for a majority, 0.95 for three quarters of at least four."""
    share = len(difference.values[0][1]) / max(num_known, 1)
    if not difference.ranks:
        return 0.6, "values are as the ranks loaded them, but no value has a majority"
    if share >= policy.drift_agreed_share and num_known >= policy.min_role_size:
        return 0.95, f"{100 * share:.0f} % of the ranks agree, as they themselves loaded it"
    return 0.8, "a majority agrees, as the ranks themselves loaded it"
