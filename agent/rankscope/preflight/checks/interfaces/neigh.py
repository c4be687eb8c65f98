"""net.neigh: the neighbour table has room for all nodes."""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed, not_measured
from rankscope.preflight.checks.interfaces.real import interface_with
from rankscope.preflight.model import Finding, Fix, Scope, Tier

_MAX_RATIO = 0.8  # other hosts of the subnet need room, too


class NetNeigh:
    """The kernel's table of neighbours (gc_thresh3) holds all nodes of the subnet."""

    id: ClassVar[str] = "net.neigh"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Warn where the nodes on the own subnet fill more than 80 % of the table."""
        yield from not_measured(self.id, run, "interfaces")
        addresses = [ipaddress.ip_address(a) for n in run.expected if (a := run.gloo_address(n))]
        count = functools.cache(lambda network: sum(a in network for a in addresses))
        full: dict[tuple[int, int], list[str]] = {}
        unread = []
        for report in run.present:
            facts = report.facts.interfaces
            row = interface_with(facts, run.gloo_address(report.node)) if facts else None
            if facts is None or row is None:
                continue
            if not facts.gc_thresh3:
                unread.append(report.node)
                continue
            # of one family each: gloo tells one address
            own = {ipaddress.ip_interface(text).network for text in row.addresses}
            neighbours = sum(count(network) for network in own) - 1
            if neighbours > _MAX_RATIO * facts.gc_thresh3:
                full.setdefault((neighbours, facts.gc_thresh3), []).append(report.node)
        if unread:
            title = f"{listed(unread)}: gc_thresh3 cannot be read in this network namespace"
            yield Finding(id=self.id, status="skipped", nodes=tuple(unread), title=title)
        for (neighbours, room), nodes in full.items():
            wanted = 1 << (4 * neighbours - 1).bit_length()
            yield Finding(
                id=self.id,
                status="warn",
                nodes=tuple(nodes),
                title=f"{listed(nodes)}: room for {room} neighbours, {neighbours} nodes nearby",
                evidence={"gc_thresh3": room, "num_neighbours": neighbours},
                fix=(
                    Fix(command=f"sudo sysctl -w net.ipv4.neigh.default.gc_thresh3={wanted} "
                        f"net.ipv4.neigh.default.gc_thresh2={wanted // 2}", owner="admin"),
                ),
                would="'neighbour table overflow' in the kernel log; connections fail by chance",
                wrong_if="a router stands between the nodes",
            )  # fmt: skip
