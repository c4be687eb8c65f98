"""sys.perf: settings of the kernel that set the pace, compared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import compared, listed, not_measured, odd_ones
from rankscope.preflight.model import Finding, Fix, Scope, Tier

_NAMES = {
    "governor": "CPU frequency governor",
    "huge_pages": "transparent huge pages",
    "numa_balancing": "NUMA balancing",
    "num_numa_nodes": "number of NUMA nodes",
}
_COMMANDS = {
    "governor": "echo {value} | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
    "huge_pages": "echo {value} | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
    "numa_balancing": "sudo sysctl -w kernel.numa_balancing={value}",
    "num_numa_nodes": "lscpu | grep NUMA   # compare the BIOS settings (NPS, SNC) of the nodes",
}


class SysPerf:
    """Settings of the kernel that set the pace are the same on all nodes.

    No setting is called wrong: only a difference is told.
    """

    id: ClassVar[str] = "sys.perf"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Warn where one node is set otherwise than most."""
        yield from not_measured(self.id, run, "limits")
        for field, words in _NAMES.items():
            values: dict[str, object] = {}
            for report in run.present:
                value = getattr(report.facts.limits, field, None)
                if value not in (None, ""):
                    values[report.node] = value
            odd = odd_ones(values)
            if not odd:
                continue
            usual = next(iter(_counted(values)))
            yield Finding(
                id=self.id,
                status="warn",
                nodes=odd,
                title=f"{listed(odd)}: {words} differs ({', '.join(map(str, _counted(values)))})",
                evidence={field: values},
                told=compared(values),
                fix=tuple(
                    Fix(node=node, command=_COMMANDS[field].format(value=usual), owner="admin")
                    for node in odd
                    if values[node] != usual
                ),
                would="the slowest node sets the pace of every step",
                wrong_if="the nodes are of different make, and that is meant",
            )


def _counted(values: dict[str, object]) -> list[object]:
    told = list(values.values())
    return sorted(set(told), key=lambda value: (-told.count(value), str(value)))
