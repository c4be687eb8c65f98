"""lim.cgroup.mem: memory that is left before something is killed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import compared, listed, not_measured, odd_ones
from rankscope.preflight.facts.limits import LimitFacts
from rankscope.preflight.model import Finding, Fix, Scope, Tier

GIB = 1 << 30
LEAST_ROOM_RATIO = 0.1  # of the limit: below, a checkpoint or a loader worker ends the job
SAME_RATIO = 0.9  # limits of nodes within a tenth are the same kind of machine


class LimCgroupMem:
    """At least a tenth of the memory is free, of the machine and of the control group.

    The killer of a control group ends one process and says nothing to the others.
    """

    id: ClassVar[str] = "lim.cgroup.mem"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset()

    def judge(self, run: Run) -> Iterator[Finding]:
        """Warn where little is free, and where one node may use less than the others."""
        yield from not_measured(self.id, run, "limits")
        rooms: dict[str, tuple[int, int, str]] = {}
        for report in run.present:
            limits = report.facts.limits
            found = _room(limits) if limits is not None else None
            if found is not None:
                rooms[report.node] = found
        low = {
            node: (limit, free, whose)
            for node, (limit, free, whose) in rooms.items()
            if free < LEAST_ROOM_RATIO * limit
        }
        if low:
            yield self._low(low)
        yield from self._unequal({node: limit for node, (limit, _, _) in rooms.items()})

    def _low(self, low: dict[str, tuple[int, int, str]]) -> Finding:
        limit, free, _ = min(low.values(), key=lambda row: row[1])
        return Finding(
            id=self.id,
            status="warn",
            nodes=tuple(low),
            title=f"{listed(low)}: {free / GIB:.1f} GiB of {limit / GIB:.1f} GiB memory left",
            evidence={"free_bytes": {name: row[1] for name, row in low.items()}},
            told=tuple(
                f"{name}: {free / GIB:.1f} of {limit / GIB:.1f} GiB left ({whose})"
                for name, (limit, free, whose) in low.items()
            ),
            fix=tuple(
                Fix(node=name, command="ps -eo pid,user,rss,etime,args --sort=-rss | head")
                for name in low
            ),
            would="a rank is killed without a message when memory runs out; the others hang",
            wrong_if="what holds the memory ends before the launch",
        )

    def _unequal(self, limits: dict[str, int]) -> Iterator[Finding]:
        most = max(limits.values(), default=0)
        small = {node: limit for node, limit in limits.items() if limit < SAME_RATIO * most}
        if not small or 2 * len(small) >= len(limits):
            return  # no majority: nobody is the odd one
        least = min(small.values())
        rounded = {node: f"{limit / GIB:.0f} GiB" for node, limit in limits.items()}
        yield Finding(
            id=self.id,
            status="warn",
            nodes=tuple(node for node in small if node in odd_ones(rounded)) or tuple(small),
            title=f"{listed(small)}: may use {least / GIB:.0f} GiB, others {most / GIB:.0f} GiB",
            evidence={"limit_bytes": limits},
            told=compared(rounded),
            fix=tuple(
                Fix(node=node, command="cat /proc/self/cgroup; free -g   # which limit holds?")
                for node in small
            ),
            would="a job that fits the other nodes is killed on this one",
            wrong_if="the nodes differ on purpose, and the job was sized for the smallest",
        )


def _room(limits: LimitFacts) -> tuple[int, int, str] | None:
    """Return limit, free bytes and whose limit it is, of the tighter of machine and group."""
    found: list[tuple[int, int, str]] = []
    total, available = limits.memory_total_bytes, limits.memory_available_bytes
    if total is not None and available is not None:
        found.append((total, available, "machine"))
    limit, used = limits.cgroup.memory_limit_bytes, limits.cgroup.memory_used_bytes
    if limit is not None and used is not None and (total is None or limit < total):
        free = max(limit - used, 0)
        found.append((limit, min(free, available or free), "control group"))
    return min(found, key=lambda row: row[0], default=None)
