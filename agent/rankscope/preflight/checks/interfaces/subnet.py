"""net.subnet: no node has two interfaces in one subnet."""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed, not_measured
from rankscope.preflight.checks.interfaces.real import is_real
from rankscope.preflight.facts.interfaces import InterfaceFacts
from rankscope.preflight.model import Finding, Fix, Scope, Tier


class NetSubnet:
    """The interfaces of a node lie in subnets that do not overlap.

    With two interfaces in one subnet the kernel sends by the first route, whichever interface a
    library has bound: what came in by one goes out by the other.
    """

    id: ClassVar[str] = "net.subnet"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Warn on overlapping IPv4 subnets among the real interfaces of a node."""
        yield from not_measured(self.id, run, "interfaces")
        by_cause: dict[tuple[str, str, str], list[str]] = {}
        for report in run.present:
            facts = report.facts.interfaces
            for pair in _overlaps(facts) if facts is not None else ():
                by_cause.setdefault(pair, []).append(report.node)
        for (first, second, subnet), nodes in by_cause.items():
            yield Finding(
                id=self.id,
                status="warn",
                nodes=tuple(nodes),
                title=f"{listed(nodes)}: {first} and {second} are both in {subnet}",
                evidence={"interfaces": [first, second], "subnet": subnet},
                fix=(
                    Fix(command=f"export NCCL_SOCKET_IFNAME=={first} GLOO_SOCKET_IFNAME={first}"),
                ),
                would="traffic of both leaves by one of them; replies that a strict rp_filter or "
                "a switch does not expect are lost",
                wrong_if="source routing is set up for both (ip rule)",
                confidence="likely",
            )


def _overlaps(facts: InterfaceFacts) -> Iterator[tuple[str, str, str]]:
    slaves = {slave for row in facts.interfaces for slave in row.bond_slaves}
    networks = [
        (row.name, interface.network)
        for row in facts.interfaces
        if is_real(row) and row.name not in slaves
        for interface in map(ipaddress.ip_interface, row.addresses)
        if interface.version == 4 and interface.network.prefixlen < 32
        and not interface.ip.is_link_local
    ]  # fmt: skip
    seen = set()
    for (name, network), (other, second) in itertools.combinations(networks, 2):
        if name != other and (name, other) not in seen and network.overlaps(second):
            seen.add((name, other))
            yield name, other, str(max(network, second, key=lambda n: n.prefixlen))
