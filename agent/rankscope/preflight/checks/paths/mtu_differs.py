"""net.mtu.differs: interfaces of different MTU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed
from rankscope.preflight.checks.pairs import interface_towards
from rankscope.preflight.facts.interfaces import Interface
from rankscope.preflight.model import Finding, Fix, Scope, Tier


class NetMtuDiffers:
    """The interfaces that the job will use have the same MTU on all nodes."""

    id: ClassVar[str] = "net.mtu.differs"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Name the nodes that differ from the majority; without one, nobody."""
        groups: dict[int, dict[str, Interface]] = defaultdict(dict)
        for report in run.present:
            interface = interface_towards(run, report.node)
            if interface is not None and interface.mtu_bytes and not interface.is_loopback:
                groups[interface.mtu_bytes][report.node] = interface
        if len(groups) < 2:
            return
        usual = max(groups, key=lambda mtu: len(groups[mtu]))
        num = sum(map(len, groups.values()))
        has_majority = 2 * len(groups[usual]) > num
        odd = {
            node: one for mtu, some in groups.items() if mtu != usual for node, one in some.items()
        }
        says = ", ".join(
            f"{listed(list(some))} {mtu}" for mtu, some in groups.items() if mtu != usual
        )
        yield Finding(
            id=self.id,
            status="warn",
            title=f"MTU differs: {says}; {listed(list(groups[usual]))} {usual} bytes",
            nodes=tuple(odd) if has_majority else (),
            evidence={"mtu_bytes": {str(mtu): list(some) for mtu, some in groups.items()}},
            told=tuple(
                f"{mtu} bytes: {listed([f'{n} ({i.name})' for n, i in some.items()])}"
                for mtu, some in groups.items()
            ),
            fix=tuple(
                Fix(node=node, command=f"sudo ip link set {one.name} mtu {usual}", owner="admin")
                for node, one in list(odd.items())[:4]
            )
            if has_majority
            else (),
            wrong_if="the job uses another interface, or the difference is meant",
        )
