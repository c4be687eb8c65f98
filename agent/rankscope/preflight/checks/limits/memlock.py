"""lim.memlock: memory that RDMA must be able to pin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed, not_measured
from rankscope.preflight.facts.limits import UNLIMITED
from rankscope.preflight.model import Finding, Fix, Scope, Tier


class LimMemlock:
    """Locked memory is unlimited wherever RDMA is used.

    Registering a buffer pins it; NCCL registers buffers of any size, so no number is enough.
    """

    id: ClassVar[str] = "lim.memlock"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"rdma"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail where a node with RDMA ports has a limit that binds."""
        yield from not_measured(self.id, run, "limits")
        if run.backend != "nccl":
            title = f"{run.backend} does not lock memory"
            yield Finding(id=self.id, status="skipped", title=title)
            return
        bad: dict[str, int] = {}
        for report in run.present:
            limits, rdma = report.facts.limits, report.facts.rdma
            if limits is None or rdma is None or not rdma.ports:
                continue
            if limits.may_lock_memory or limits.memlock_soft_bytes in (None, UNLIMITED):
                continue
            bad[report.node] = limits.memlock_soft_bytes or 0
        if not bad:
            return
        least = min(bad.values())
        yield Finding(
            id=self.id,
            status="fail",
            nodes=tuple(bad),
            title=f"{listed(bad)}: only {least >> 10} KiB may be locked, RDMA needs unlimited",
            evidence={"memlock_soft_bytes": bad},
            told=tuple(f"{node}: ulimit -l is {size >> 10} KiB" for node, size in bad.items()),
            fix=tuple(fix for node in bad for fix in _fixes(run, node)),
            would="NCCL init fails: ibv_create_cq or ibv_reg_mr 'Cannot allocate memory'",
            wrong_if="the job runs with other limits than this shell (systemd, Slurm propagation)",
        )


def _fixes(run: Run, node: str) -> tuple[Fix, ...]:
    host = run.reports[node].facts.host
    container = host.container if host is not None else ""
    if container in ("docker", "podman"):
        command = f"{container} run --ulimit memlock=-1 ...   # start the container with this"
        return (Fix(node=node, command=command),)
    line = "* - memlock unlimited"
    command = f"echo '{line}' | sudo tee /etc/security/limits.d/90-rdma.conf   # then log in again"
    return (Fix(node=node, command=command, owner="admin"),)
