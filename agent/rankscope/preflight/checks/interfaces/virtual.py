"""net.iface.virtual: what gloo tells the others is no bridge of the machine itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import by_value, listed, not_measured
from rankscope.preflight.checks.interfaces.real import best_interface, interface_with
from rankscope.preflight.checks.launch.local import is_local
from rankscope.preflight.facts.interfaces import Choice, kind_of
from rankscope.preflight.model import Finding, Fix, NodeReport, Scope, Tier


class NetIfaceVirtual:
    """The interface that gloo takes is no docker0, bridge or tunnel that peers cannot reach.

    docker0 has the same address on every machine, so that each rank calls itself.
    """

    id: ClassVar[str] = "net.iface.virtual"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail on a virtual interface, unless a peer has connected to it."""
        yield from not_measured(self.id, run, "interfaces")
        chosen = {r.node: c for r in run.present if (c := _choice(r)) is not None and c.address}
        owners = by_value({node: choice.address for node, choice in chosen.items()})
        groups: dict[str, list[str]] = {}
        for node, choice in chosen.items():
            is_twin = len(owners[choice.address]) > 1
            if kind_of(choice.interface) and (is_twin or not _is_reached(run, node, choice)):
                groups.setdefault(choice.interface, []).append(node)
        for interface, nodes in groups.items():
            yield self._finding(run, interface, nodes, chosen)

    def _finding(
        self, run: Run, interface: str, nodes: list[str], chosen: dict[str, Choice]
    ) -> Finding:
        addresses = sorted({chosen[node].address for node in nodes})
        is_twin = len(nodes) > 1 and len(addresses) == 1
        title = f"{listed(nodes)}: gloo takes {interface} ({kind_of(interface)})"
        if is_twin:
            title += f", which is {addresses[0]} on all of them"
        return Finding(
            id=self.id,
            status="fail" if run.backend == "gloo" else "warn",
            nodes=tuple(nodes),
            title=title,
            evidence={"interface": interface, "addresses": {n: chosen[n].address for n in nodes}},
            told=tuple(f"{n}: {chosen[n].address}: {chosen[n].how}" for n in nodes[:4]),
            fix=tuple(
                Fix(node=node, command=f"export GLOO_SOCKET_IFNAME={name}")
                for node in nodes
                if (name := best_interface(run, node))
            ),
            would=f"gloo init: 'Connection refused, remote=[{addresses[0]}]' on some ranks after "
            "15 to 30 s, the rest hang for more than 30 min",
            wrong_if="" if is_twin else "the network behind it joins the machines",
            confidence="proven" if is_twin else "likely",
        )


def _choice(report: NodeReport) -> Choice | None:
    """Return what gloo takes: its own answer where it was asked, with the interface's name."""
    facts, smoke = report.facts.interfaces, report.facts.smoke
    if facts is None:
        return None
    asked = next((c for c in (smoke.gloo if smoke is not None else ()) if c.address), None)
    choice = asked or (facts.gloo[0] if facts.gloo else None)
    if choice is None or is_local(choice.address):
        return None
    if not choice.interface:
        row = interface_with(facts, choice.address)
        return Choice(interface=row.name if row else "", address=choice.address, how=choice.how)
    return choice


def _is_reached(run: Run, node: str, choice: Choice) -> bool:
    """Return whether some peer's connection came to that address, answered by that node."""
    for report in run.present:
        edge = report.edges.get(node)
        if edge is None:
            continue
        dials = [*edge.ephemeral, *([edge.mesh] if edge.mesh is not None else [])]
        if any(d.outcome == "ok" and d.address == choice.address for d in dials):
            return True
    return False
