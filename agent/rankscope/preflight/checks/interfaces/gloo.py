"""net.iface.gloo: gloo tells the others an address that can be used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.collective.truth import difference
from rankscope.preflight.checks.comparing import listed, not_measured
from rankscope.preflight.checks.interfaces.real import best_interface
from rankscope.preflight.checks.launch.local import is_local
from rankscope.preflight.checks.names.self_loopback import loopback_by_name
from rankscope.preflight.model import Finding, Fix, NodeReport, Scope, Tier


class NetIfaceGloo:
    """The interface that gloo takes is up, has an address, and is not loopback.

    Worked out from gloo's rules; where torch is there, gloo itself is asked.
    """

    id: ClassVar[str] = "net.iface.gloo"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail on an interface that carries nothing to others."""
        yield from not_measured(self.id, run, "interfaces")
        by_cause: dict[str, list[str]] = {}
        for report in run.present:
            cause = _fault(report)
            if cause:
                by_cause.setdefault(cause, []).append(report.node)
        for cause, nodes in by_cause.items():
            yield Finding(
                id=self.id,
                status="fail" if run.backend == "gloo" else "warn",
                nodes=tuple(nodes),
                title=f"{listed(nodes)}: {cause}",
                evidence={node: _evidence(run.reports[node]) for node in nodes},
                told=tuple(
                    difference(run, n) or f"{n}: emulated {_emulated(run.reports[n])}"
                    for n in nodes[:4]
                ),
                fix=tuple(_fixes(run, nodes)),
                would="gloo init: other ranks are refused or hang for more than 30 min",
                wrong_if="the job never uses gloo" if run.backend != "gloo" else "",
            )


def _fault(report: NodeReport) -> str:
    """Return why gloo's choice is of no use; "" where it is, or another check says it."""
    facts, smoke = report.facts.interfaces, report.facts.smoke
    if facts is None or not facts.gloo or loopback_by_name(report) is not None:
        return ""
    truth = next((c for c in (smoke.gloo if smoke is not None else ()) if c.address), None)
    chosen = truth or facts.gloo[0]
    if chosen.problem and not chosen.address:
        # a name that no interface has is net.iface.missing's
        return f"{chosen.problem} ({chosen.how})" if "has no address" in chosen.problem else ""
    if is_local(chosen.address):
        how = facts.gloo[0].how if truth is None else "gloo itself, asked"
        return f"gloo tells the others {chosen.address}, which is each node itself ({how})"
    name = chosen.interface or facts.gloo[0].interface
    down = [row for row in facts.interfaces if row.name == name and not row.is_up]
    return f"gloo takes {name}, which is down ({chosen.how})" if down else ""


def _emulated(report: NodeReport) -> str:
    facts = report.facts.interfaces
    choice = facts.gloo[0] if facts is not None and facts.gloo else None
    if choice is None:
        return "nothing"
    return f"{choice.interface or '-'} {choice.address or '-'}: {choice.how}"


def _evidence(report: NodeReport) -> dict[str, object]:
    facts, smoke = report.facts.interfaces, report.facts.smoke
    return {
        "emulated": [c.address for c in facts.gloo] if facts is not None else [],
        "asked": [c.address for c in smoke.gloo] if smoke is not None else [],
    }


def _fixes(run: Run, nodes: list[str]) -> Iterator[Fix]:
    for node in nodes:
        name = best_interface(run, node)
        if name:
            yield Fix(node=node, command=f"export GLOO_SOCKET_IFNAME={name}")
