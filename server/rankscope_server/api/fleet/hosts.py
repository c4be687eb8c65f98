"""Hosts over runs: in how many of the runs that it was in was a host slow? Pure.

A host is compared with others: a run on one host alone says nothing about the host, and a finding
that names most of a run's hosts says nothing about any of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rankscope_server.answers import to_ms
from rankscope_server.api.fleet.schema import FleetHost, HostRun
from rankscope_server.findings.kinds import SLOW_KINDS

MAX_NAMED = 5
FAILED_KINDS = frozenset({"crash", "hang"})
_MOST_OF_A_RUN = 0.5  # a finding that names more of its hosts is about the run
# What is said of a host in the first sentence rests on more than one run.
_LEAST_RUNS, _LEAST_SHARE = 2, 0.5


@dataclass(frozen=True, slots=True)
class Named:
    """A finding of weight that names hosts."""

    id: int
    run_id: str
    kind: str
    what: str
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """A run: when it began, and on which hosts."""

    run_id: str
    name: str
    started_ns: int
    hosts: frozenset[str]


@dataclass(slots=True)
class _Host:
    runs: set[str] = field(default_factory=set)
    alone: set[str] = field(default_factory=set)
    slow: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    named: list[HostRun] = field(default_factory=list)
    last_ns: int = 0


def hosts_over_runs(runs: Sequence[Run], named: Iterable[Named]) -> list[FleetHost]:
    """Return the hosts of these runs, those that were slow in most of theirs first."""
    by_id = {run.run_id: run for run in runs}
    found: dict[str, _Host] = {}
    for run in runs:
        for name in run.hosts:
            host = found.setdefault(name, _Host())
            (host.runs if len(run.hosts) > 1 else host.alone).add(run.run_id)
            host.last_ns = max(host.last_ns, run.started_ns)
    for finding in sorted(named, key=lambda one: -_began(by_id, one)):
        in_run = by_id.get(finding.run_id)
        if in_run is None or not _is_about_hosts(finding, in_run):
            continue
        for name in finding.hosts:
            host = found.setdefault(name, _Host())
            host.runs.add(finding.run_id)  # of an attempt before the newest
            kinds = host.slow if finding.kind in SLOW_KINDS else host.failed
            kinds.add(finding.run_id)
            host.named.append(_row(in_run, finding))
    shown = [_answer(name, host) for name, host in found.items()]
    return sorted(shown, key=lambda one: (-_weight(one), -one.num_runs, one.host))


def worst_host(hosts: Sequence[FleetHost]) -> FleetHost | None:
    """Return the host of which the first sentence speaks: slow again and again; else None."""
    if not hosts or hosts[0].num_slow < _LEAST_RUNS:
        return None
    return hosts[0] if hosts[0].num_slow >= _LEAST_SHARE * hosts[0].num_runs else None


def counts(kind: str) -> bool:
    """Return whether findings of a kind are counted against hosts."""
    return kind in SLOW_KINDS or kind in FAILED_KINDS


def _began(runs: Mapping[str, Run], finding: Named) -> int:
    run = runs.get(finding.run_id)
    return run.started_ns if run is not None else 0


def _is_about_hosts(finding: Named, run: Run) -> bool:
    hosts = run.hosts | set(finding.hosts)
    return len(hosts) > 1 and len(set(finding.hosts)) <= _MOST_OF_A_RUN * len(hosts)


def _row(run: Run, finding: Named) -> HostRun:
    return HostRun(
        run_id=run.run_id, name=run.name, finding=finding.id, kind=finding.kind, what=finding.what,
        started_ms=to_ms(run.started_ns),
    )  # fmt: skip


def _answer(name: str, host: _Host) -> FleetHost:
    return FleetHost(
        host=name, num_runs=len(host.runs), num_alone=len(host.alone - host.runs),
        num_slow=len(host.slow), num_failed=len(host.failed), named=host.named[:MAX_NAMED],
        num_named=len(host.named), last_ms=to_ms(host.last_ns),
    )  # fmt: skip


def _weight(host: FleetHost) -> float:
    """Return the share of its runs in which it was slow or failed; one run alone weighs less."""
    bad = host.num_slow + host.num_failed
    return bad / (host.num_runs + 1)
