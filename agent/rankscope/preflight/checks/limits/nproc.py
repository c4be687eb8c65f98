"""lim.nproc: room for the processes and threads that the ranks start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed, not_measured
from rankscope.preflight.facts.limits import UNLIMITED, LimitFacts
from rankscope.preflight.model import Finding, Fix, Scope, Tier

# A rank on CPU runs the main thread, gloo's and autograd's threads and torchrun's own: 30 is what
# the design found; each loader worker is a process with a feeding thread beside it.
TASKS_PER_RANK = 30


class LimNproc:
    """There is room for the processes and threads of all ranks and their loader workers.

    Counts threads of this user against `ulimit -u`, and tasks of the control group against
    `pids.max`.
    """

    id: ClassVar[str] = "lim.nproc"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset()

    def judge(self, run: Run) -> Iterator[Finding]:
        """Warn where less is left than the ranks will start."""
        yield from not_measured(self.id, run, "limits")
        for what, command in _REMEDIES.items():
            bad: dict[str, tuple[int, int, int]] = {}
            for report in run.present:
                limits = report.facts.limits
                room = _room(limits, what) if limits is not None else None
                need = run.nproc(report.node) * (run.options.num_loader_workers + TASKS_PER_RANK)
                if room is not None and room[0] - room[1] < need:
                    bad[report.node] = (*room, need)
            if bad:
                yield self._finding(what, command, bad)

    def _finding(self, what: str, command: str, bad: dict[str, tuple[int, int, int]]) -> Finding:
        limit, used, need = min(bad.values(), key=lambda row: row[0] - row[1])
        left = max(limit - used, 0)
        return Finding(
            id=self.id,
            status="warn",
            nodes=tuple(bad),
            title=f"{listed(bad)}: {left} more tasks allowed by {what}, {need} wanted",
            evidence={"limit_used_wanted": {name: list(row) for name, row in bad.items()}},
            told=tuple(
                f"{name}: {used} of {limit} in use, the ranks start about {need}"
                for name, (limit, used, need) in bad.items()
            ),
            fix=tuple(
                Fix(node=name, command=command.format(wanted=row[1] + 2 * row[2]), owner="admin")
                for name, row in bad.items()
            ),
            would="a rank dies: 'Resource temporarily unavailable', 'can't start new thread'",
            wrong_if="other processes of this user end before the launch",
        )


_REMEDIES = {
    "ulimit -u": "sudo prlimit --nproc={wanted} --pid $PPID   # or /etc/security/limits.d",
    "pids.max": "start the container or the service with a higher limit: --pids-limit {wanted}, "
    "or TasksMax={wanted}",
}


def _room(limits: LimitFacts, what: str) -> tuple[int, int] | None:
    """Return the limit and what is used of it; None where there is none."""
    if what == "pids.max":
        group = limits.cgroup
        if group.pids_max is None or group.pids_now is None:
            return None
        return group.pids_max, group.pids_now
    if not limits.nproc_binds or limits.nproc_soft in (None, UNLIMITED):
        return None
    if limits.num_user_tasks is None:
        return None
    return limits.nproc_soft or 0, limits.num_user_tasks
