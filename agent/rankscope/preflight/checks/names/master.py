"""dns.master: the name of the master can be resolved on every node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed, not_measured
from rankscope.preflight.facts.launch import Mode
from rankscope.preflight.facts.names import Resolved
from rankscope.preflight.model import Finding, Fix, Scope, Tier

SLOW_MS = 1000.0  # c10d and gloo ask many times; a resolver with a cache answers within 10 ms
_WOULD: dict[Mode, str] = {
    "static": "'gai error' again and again on that node; all end after 15 to 30 min",
    "c10d": "'gai error' again and again on that node; all end after 10 min",
    "env": "'gai error' again and again on that node; all end after 30 min",
}


class DnsMaster:
    """Every node resolves the name of the master, within a second."""

    id: ClassVar[str] = "dns.master"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset()

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail where there is no answer, warn where it is slow."""
        yield from not_measured(self.id, run, "names")
        answers: dict[str, Resolved] = {}
        untold = []
        for report in run.present:
            if report.facts.names is not None:
                if report.facts.names.master is None:
                    untold.append(report.node)
                else:
                    answers[report.node] = report.facts.names.master
        if untold and not answers:
            yield Finding(id=self.id, status="skipped", title="nobody was told a MASTER_ADDR")
        failed: dict[tuple[str, str], list[str]] = {}
        for node, answer in answers.items():
            if answer.error:
                failed.setdefault((answer.name, answer.error), []).append(node)
        for (name, error), nodes in failed.items():
            yield self._failed(run, name, error, nodes)
        slow = {n: a for n, a in answers.items() if not a.error and a.elapsed_ms > SLOW_MS}
        if slow:
            yield self._slow(run, slow)

    def _failed(self, run: Run, name: str, error: str, nodes: list[str]) -> Finding:
        is_silent = error.startswith("no answer")
        return Finding(
            id=self.id,
            status="fail",
            nodes=tuple(nodes),
            title=f"{listed(nodes)} cannot resolve {name}: {error}",
            evidence={"name": name, "error": error},
            told=tuple(f"{node}: getaddrinfo({name!r}): {error}" for node in nodes[:4]),
            fix=_hosts_line(run, name, nodes),
            would=_WOULD[run.mode],
            wrong_if="the resolver does answer, but only later" if is_silent else "",
            confidence="likely" if is_silent else "proven",
        )

    def _slow(self, run: Run, slow: dict[str, Resolved]) -> Finding:
        node, worst = max(slow.items(), key=lambda item: item[1].elapsed_ms)
        return Finding(
            id=self.id,
            status="warn",
            nodes=tuple(slow),
            title=f"{listed(slow)}: {worst.name} takes {worst.elapsed_ms / 1e3:.1f} s to resolve",
            evidence={node: {"elapsed_ms": a.elapsed_ms} for node, a in slow.items()},
            told=(f"{node}: {worst.elapsed_ms:.0f} ms for {', '.join(worst.addresses)}",),
            fix=_hosts_line(run, worst.name, list(slow)),
            would="each process asks several times: the start takes longer, or times out",
            wrong_if="the resolver was busy just then",
        )


def _hosts_line(run: Run, name: str, nodes: list[str]) -> tuple[Fix, ...]:
    """Return the line for /etc/hosts, with the address that the master itself reports."""
    report = run.reports.get(run.master)
    if report is None or not report.addresses:
        return ()
    address = run.gloo_address(run.master)
    if address not in report.addresses:
        address = report.addresses[0]
    command = f"echo '{address} {name}' | sudo tee -a /etc/hosts"
    return tuple(Fix(node=node, command=command, owner="admin") for node in nodes)
