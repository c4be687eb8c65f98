"""port.master.range: MASTER_PORT is not one that the kernel hands out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.model import Finding, Fix, Scope, Tier

_SAFE = 29500  # torchrun's default; IANA has assigned nobody 29400 to 29999


class PortMasterRange:
    """MASTER_PORT lies outside the range of ports that the kernel gives to anybody who asks."""

    id: ClassVar[str] = "port.master.range"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset()

    def judge(self, run: Run) -> Iterator[Finding]:
        """Warn where any outgoing connection of the master may take the port first."""
        report = run.reports.get(run.master)
        facts = report.facts.ports if report is not None else None
        if facts is None or not facts.range_high:
            title = "the range of ephemeral ports of the master is not known"
            yield Finding(id=self.id, status="unknown", title=title)
            return
        port = run.master_port
        if not facts.range_low <= port <= facts.range_high:
            return
        free = _SAFE if not facts.range_low <= _SAFE <= facts.range_high else facts.range_low - 1
        command = f"export MASTER_PORT={free}"
        if run.mode == "static":
            command = f"torchrun --master-port {free} ..."
        elif run.mode == "c10d":
            command = f"torchrun --rdzv-endpoint {run.master}:{free} ..."
        yield Finding(
            id=self.id,
            status="warn",
            nodes=(run.master,),
            title=f"{run.master}: MASTER_PORT {port} lies in the ephemeral range "
            f"{facts.range_low}-{facts.range_high}",
            evidence={
                "port": port,
                "range_low": facts.range_low,
                "range_high": facts.range_high,
            },
            fix=(Fix(command=command),),
            would="now and then: EADDRINUSE at the start, because another program got this port",
            wrong_if="net.ipv4.ip_local_reserved_ports holds it",
            confidence="likely",
        )
