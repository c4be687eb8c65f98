"""net.dup_ip: every address belongs to one node."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed, not_measured
from rankscope.preflight.checks.interfaces.real import addresses_of, is_real
from rankscope.preflight.model import Finding, Fix, NodeReport, Scope, Tier


class NetDupIp:
    """No address of a real interface is on two nodes."""

    id: ClassVar[str] = "net.dup_ip"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail where the job would use the address, warn where it lies idle."""
        yield from not_measured(self.id, run, "interfaces")
        owners: dict[str, dict[str, str]] = {}  # address: node: interface
        for report in run.present:
            for address, interface in _real_addresses(report):
                owners.setdefault(address, {})[report.node] = interface
        groups: dict[tuple[str, ...], list[str]] = {}
        for address, where in owners.items():
            nodes = _distinct(run, tuple(where))
            if len(nodes) > 1:
                groups.setdefault(nodes, []).append(address)
        used = _used(run) if groups else frozenset()
        for nodes, addresses in groups.items():
            yield self._finding(run, nodes, addresses, owners, used)

    def _finding(
        self,
        run: Run,
        nodes: tuple[str, ...],
        addresses: list[str],
        owners: dict[str, dict[str, str]],
        used: frozenset[str],
    ) -> Finding:
        address = next((a for a in addresses if a in used), addresses[0])
        is_used = address in used
        where = owners[address]
        shown = [f"{node}: {address} on {where[node]}" for node in nodes[:4]]
        return Finding(
            id=self.id,
            status="fail" if is_used else "warn",
            nodes=nodes,
            title=f"{listed(nodes)} have the same address {address}",
            evidence={a: {node: owners[a][node] for node in nodes} for a in addresses},
            told=tuple(shown),
            fix=tuple(
                Fix(
                    node=node,
                    command=f"sudo ip addr del {_with_length(run, node, address)} "
                    f"dev {where[node]}  # then give it an address of its own",
                    owner="admin",
                )
                for node in nodes[1:]
            ),
            would="whoever answers first is taken for the other: store time-outs, hangs of more "
            "than 30 min"
            if is_used
            else "nothing, as long as no library takes this interface",
            wrong_if="" if is_used else "the two interfaces are in networks that never meet",
            confidence="proven" if is_used else "likely",
        )


def _real_addresses(report: NodeReport) -> Iterator[tuple[str, str]]:
    facts = report.facts.interfaces
    for row in facts.interfaces if facts is not None else ():
        if is_real(row):
            for address in addresses_of(row):
                if not ipaddress.ip_address(address).is_link_local:
                    yield address, row.name


def _distinct(run: Run, nodes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the nodes without those that are the same place as an earlier one (`host.dup`)."""
    seen: set[tuple[str, int]] = set()
    kept = []
    for node in nodes:
        host = run.reports[node].facts.host
        place = (host.boot_id, host.network_namespace) if host is not None else (node, 0)
        if place not in seen or not all(place):
            kept.append(node)
        seen.add(place)
    return tuple(kept)


def _used(run: Run) -> frozenset[str]:
    """Return the addresses that the job would tell or dial."""
    used: set[str] = set()
    for report in run.present:
        facts = report.facts.interfaces
        if facts is not None:
            choices = (*facts.gloo, *(facts.nccl if run.backend == "nccl" else ()))
            used.update(choice.address for choice in choices)
    for _, _, edge in run.edges():
        used.add(edge.source_address)
        if edge.resolved is not None:
            used.update(edge.resolved.addresses)
    return frozenset(used)


def _with_length(run: Run, node: str, address: str) -> str:
    facts = run.reports[node].facts.interfaces
    texts = [
        text for row in (facts.interfaces if facts is not None else ()) for text in row.addresses
    ]
    return next((text for text in texts if text.partition("/")[0] == address), address)
