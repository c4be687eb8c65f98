"""clock.sync: somebody keeps the clocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checking import Need, Run
from rankscope.preflight.comparing import listed, not_measured
from rankscope.preflight.model import Finding, Fix, Scope, Tier


class ClockSync:
    """A service keeps the clock of every machine, so that they do not drift apart.

    Nodes with one boot id share one clock, which cannot drift from itself.
    """

    id: ClassVar[str] = "clock.sync"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Warn where the kernel says STA_UNSYNC and there is another clock to drift from."""
        yield from not_measured(self.id, run, "host")
        hosts = {r.node: r.facts.host for r in run.present if r.facts.host is not None}
        unknown = [node for node, host in hosts.items() if host.clock_is_synchronised is None]
        if unknown:
            title = f"{listed(unknown)}: the kernel does not tell (adjtimex)"
            yield Finding(id=self.id, status="unknown", nodes=tuple(unknown), title=title)
        loose = [node for node, host in hosts.items() if host.clock_is_synchronised is False]
        if not loose or len({host.boot_id or node for node, host in hosts.items()}) < 2:
            return
        yield Finding(
            id=self.id,
            status="warn",
            nodes=tuple(loose),
            title=f"{listed(loose)}: nothing keeps the clock (STA_UNSYNC)",
            evidence={node: {"is_synchronised": False} for node in loose},
            told=("clocks that nobody keeps drift apart by up to some seconds a day",),
            fix=tuple(
                Fix(node=n, command="sudo systemctl enable --now chrony", owner="admin")
                for n in loose
            ),
            would="today nothing; from 15 s behind the others on, a c10d rendezvous drops the "
            "node without a word and trains with a smaller world",
            wrong_if="the host of a virtual machine keeps its clock without telling the kernel",
        )
