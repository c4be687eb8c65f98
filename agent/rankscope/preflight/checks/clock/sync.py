"""clock.sync: somebody keeps the clocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checking import Need, Run
from rankscope.preflight.comparing import listed, not_measured
from rankscope.preflight.model import Finding, Fix, Scope, Tier

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
        seen = [abs(e.clock.offset_ms) for _, _, e in run.edges() if e.clock is not None]
        apart_ms = max(seen, default=0.0)
        if not loose or apart_ms < APART_MS:
            return
        yield Finding(
            id=self.id,
            status="warn",
            nodes=tuple(loose),
            title=f"{listed(loose)}: nothing keeps the clock (STA_UNSYNC), and clocks are up to "
            f"{apart_ms:.0f} ms apart",
            evidence={"apart_ms": round(apart_ms, 1), "not_synchronised": loose},
            told=("clocks that nobody keeps drift apart by up to some seconds a day",),
            fix=tuple(
                Fix(node=n, command="sudo systemctl enable --now chrony", owner="admin")
                for n in loose
            ),
            would="today nothing; from 15 s behind the others on, a c10d rendezvous drops the "
            "node without a word and trains with a smaller world",
            wrong_if="the host of a virtual machine keeps its clock without telling the kernel",
        )
