"""lim.cgroup.cpu: cores that this process may really use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed, not_measured
from rankscope.preflight.model import Finding, Fix, Scope, Tier


class LimCgroupCpu:
    """There is at least one usable core for each rank.

    A quota of the control group stops all threads of a rank for the rest of every 100 ms; an
    affinity that the launcher left puts all ranks on one core.
    """

    id: ClassVar[str] = "lim.cgroup.cpu"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset()

    def judge(self, run: Run) -> Iterator[Finding]:
        """Warn where ranks outnumber cores, by quota or affinity."""
        yield from not_measured(self.id, run, "limits")
        bad: dict[str, tuple[float, str, int]] = {}
        for report in run.present:
            limits = report.facts.limits
            if limits is None:
                continue
            quota = limits.cgroup.cpu_cores
            told: list[tuple[float, str]] = []
            if limits.num_cores is not None:
                told.append((float(limits.num_cores), "affinity"))
            if quota is not None:
                told.append((quota, "quota of the control group"))
            nproc = run.nproc(report.node)
            if told and min(told)[0] < nproc:
                bad[report.node] = (*min(told), nproc)
        if not bad:
            return
        cores, whose, nproc = min(bad.values())
        yield Finding(
            id=self.id,
            status="warn",
            nodes=tuple(bad),
            title=f"{listed(bad)}: {cores:g} cores usable ({whose}), {nproc} ranks",
            evidence={"cores": {name: row[0] for name, row in bad.items()}, "nproc": nproc},
            told=tuple(
                f"{name}: {cores:g} cores by {whose}, {nproc} ranks"
                for name, (cores, whose, nproc) in bad.items()
            ),
            fix=tuple(_fix(name, row[1], row[2]) for name, row in bad.items()),
            would="ranks take turns on the cores: every step is slower, timings of all ranks jump",
            wrong_if="the job starts with another quota or affinity than this shell",
        )


def _fix(node: str, whose: str, nproc: int) -> Fix:
    if whose == "affinity":
        return Fix(node=node, command=f"nproc; taskset -cp $$   # ask for {nproc} cores or more")
    command = f"docker update --cpus={nproc} CONTAINER   # or systemd CPUQuota={nproc * 100}%"
    return Fix(node=node, command=command, owner="admin")
