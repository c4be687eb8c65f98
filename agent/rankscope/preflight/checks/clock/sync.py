"""clock.sync: somebody keeps the clocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed, not_measured
from rankscope.preflight.model import Finding, Fix, NodeReport, Scope, Tier

APART_MS = 100.0  # NTP keeps machines within some ms; a tenth of what `clock.offset` warns of


class ClockSync:
    """A service keeps the clock of every machine, so that they do not drift apart.

    That the kernel knows of no such service proves little: many a virtual machine has its clock
    from its host. It is told where the clocks are apart already.
    """

    id: ClassVar[str] = "clock.sync"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Warn where the kernel says STA_UNSYNC and clocks are seen to be apart."""
        yield from not_measured(self.id, run, "host")
        hosts = {r.node: r.facts.host for r in run.present if r.facts.host is not None}
        unknown = [node for node, host in hosts.items() if host.clock_is_synchronised is None]
        if unknown:
            title = f"{listed(unknown)}: the kernel does not tell (adjtimex)"
            yield Finding(id=self.id, status="unknown", nodes=tuple(unknown), title=title)
        loose = [node for node, host in hosts.items() if host.clock_is_synchronised is False]
        apart_ms = {node: _apart_ms(run.reports[node]) for node in loose}
        loose = [node for node in loose if apart_ms[node] >= APART_MS]
        if not loose:
            return
        yield Finding(
            id=self.id,
            status="warn",
            nodes=tuple(loose),
            title=f"{listed(loose)}: nothing keeps the clock (STA_UNSYNC), and it is "
            f"{max(apart_ms[node] for node in loose):.0f} ms apart from the others",
            evidence={node: {"apart_ms": round(apart_ms[node], 1)} for node in loose},
            told=("clocks that nobody keeps drift apart by up to some seconds a day",),
            fix=tuple(
                Fix(node=n, command="sudo systemctl enable --now chrony", owner="admin")
                for n in loose
            ),
            would="today nothing; from 15 s behind the others on, a c10d rendezvous drops the "
            "node without a word and trains with a smaller world",
            wrong_if="the host of a virtual machine keeps its clock without telling the kernel",
        )


def _apart_ms(report: NodeReport) -> float:
    """Return how far the clock of a node is from the nearest one of its peers."""
    seen = [abs(e.clock.offset_ms) for e in report.edges.values() if e.clock is not None]
    return min(seen, default=0.0)
