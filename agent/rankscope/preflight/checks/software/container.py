"""sw.container: the nodes run in the same kind of box."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import compared, listed, not_measured, odd_ones
from rankscope.preflight.model import Finding, Fix, Scope, Tier


class SwContainer:
    """All nodes run in a container of the same kind, or none does."""

    id: ClassVar[str] = "sw.container"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Warn where some are in and some out, or share the host's network and others do not."""
        yield from not_measured(self.id, run, "host")
        kinds: dict[str, str] = {}
        for report in run.present:
            host = report.facts.host
            if host is not None:
                net = ", network of the host" if host.container and host.is_host_network else ""
                kinds[report.node] = f"{host.container or 'no container'}{net}"
        odd = odd_ones(kinds)
        if not odd:
            return
        others = [node for node in kinds if node not in odd]
        usual = f", the others: {kinds[others[0]]}" if others else ""
        yield Finding(
            id=self.id,
            status="warn",
            nodes=odd,
            title=f"{listed(odd)}: {kinds[odd[0]]}{usual}",
            evidence={"containers": kinds},
            told=compared(kinds),
            fix=tuple(
                Fix(node=node, command="start the preflight and the job in the same image as there")
                for node in odd
            ),
            would="other libraries, limits and addresses on this node than on the others",
            wrong_if="the preflight was started outside of the container that the job will use",
        )
