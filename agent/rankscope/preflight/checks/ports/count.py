"""port.count: there are ports enough for all connections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed, not_measured
from rankscope.preflight.model import Finding, Fix, Scope, Tier

# connections of one rank to one other: gloo has one in each process group (default, and some
# of meshes), NCCL's sockets up to 8 a channel, for the peers in its rings and trees only
_PER_PAIR = 4
_MAX_RATIO = 0.5  # other programs need ports, too, and closed ones wait for a minute


class PortCount:
    """The range of ephemeral ports is wide enough for the connections of all ranks."""

    id: ClassVar[str] = "port.count"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Warn where they would fill half of it."""
        yield from not_measured(self.id, run, "ports")
        world = sum(run.nproc(node) for node in run.expected)
        tight: dict[tuple[int, int, int], list[str]] = {}
        for report in run.present:
            facts = report.facts.ports
            if facts is None or not facts.range_high:
                continue
            nproc = run.nproc(report.node)
            needed = _PER_PAIR * nproc * (world - nproc) + max(0, facts.num_time_wait)
            size = facts.range_high - facts.range_low + 1
            if needed > _MAX_RATIO * size:
                key = (needed, size, max(0, facts.num_time_wait))
                tight.setdefault(key, []).append(report.node)
        for (needed, size, waiting), nodes in tight.items():
            yield Finding(
                id=self.id,
                status="warn",
                nodes=tuple(nodes),
                title=f"{listed(nodes)}: about {needed} ports needed, the range has {size}",
                evidence={"num_needed": needed, "num_ports": size, "num_time_wait": waiting},
                fix=(
                    Fix(
                        command="sudo sysctl -w net.ipv4.ip_local_port_range='30000 65535'",
                        owner="admin",
                    ),
                ),
                would="'Cannot assign requested address' while process groups are made",
                wrong_if="the job makes few process groups",
                confidence="likely",
            )
