"""port.conntrack: the firewall's table of connections has room."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed, not_measured
from rankscope.preflight.model import Finding, Fix, Scope, Tier

_MAX_RATIO = 0.8


class PortConntrack:
    """The table in which the firewall follows connections is at most 80 % full."""

    id: ClassVar[str] = "port.conntrack"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset()

    def judge(self, run: Run) -> Iterator[Finding]:
        """Warn where new connections will soon be dropped."""
        yield from not_measured(self.id, run, "ports")
        without = []
        for report in run.present:
            facts = report.facts.ports
            if facts is None:
                continue
            if facts.conntrack_max <= 0 or facts.conntrack_count < 0:
                without.append(report.node)
            elif facts.conntrack_count > _MAX_RATIO * facts.conntrack_max:
                yield self._finding(report.node, facts.conntrack_count, facts.conntrack_max)
        if without:
            title = f"{listed(without)}: no table of connections to be seen (nf_conntrack)"
            yield Finding(id=self.id, status="skipped", nodes=tuple(without), title=title)

    def _finding(self, node: str, count: int, room: int) -> Finding:
        command = f"sudo sysctl -w net.netfilter.nf_conntrack_max={4 * room}"
        return Finding(
            id=self.id,
            status="warn",
            nodes=(node,),
            title=f"{node}: {count} of {room} tracked connections are in use",
            evidence={"num_tracked": count, "num_max": room},
            fix=(Fix(node=node, command=command, owner="admin"),),
            would="'nf_conntrack: table full, dropping packet': connections time out by chance",
            wrong_if="the rules do not track the ports of this job",
        )
