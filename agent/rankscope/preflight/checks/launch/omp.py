"""env.omp: the threads of all ranks of a node fit its cores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed, not_measured
from rankscope.preflight.model import Finding, Fix, NodeReport, Scope, Tier


class EnvOmp:
    """OMP_NUM_THREADS times the ranks of a node is no more than its usable cores.

    Where it is not set, torchrun sets 1 for several ranks; other launchers leave each rank as
    many threads as there are cores.
    """

    id: ClassVar[str] = "env.omp"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset()

    def judge(self, run: Run) -> Iterator[Finding]:
        """Warn where ranks would fight for cores."""
        yield from not_measured(self.id, run, "host")
        by_cause: dict[tuple[str, int, int, int], list[str]] = {}
        for report in run.present:
            cause = _excess(run, report)
            if cause is not None:
                by_cause.setdefault(cause, []).append(report.node)
        for (said, threads, nproc, cores), nodes in by_cause.items():
            fitting = max(1, cores // nproc)
            yield Finding(
                id=self.id,
                status="warn",
                nodes=tuple(nodes),
                title=f"{listed(nodes)}: {nproc} ranks x {threads} threads on {cores} cores "
                f"(OMP_NUM_THREADS {said})",
                evidence={"num_threads": threads, "num_ranks": nproc, "num_cores": cores},
                fix=(Fix(command=f"export OMP_NUM_THREADS={fitting}"),),
                would="the job runs, but its CPU work is slowed by threads that wait for a core",
                wrong_if="the program sets its threads itself, or does no work on the CPU",
            )


def _excess(run: Run, report: NodeReport) -> tuple[str, int, int, int] | None:
    """Return (what is said, threads, ranks, cores) where they do not fit."""
    host, launch = report.facts.host, report.facts.launch
    if host is None or launch is None or host.num_cores < 1 or launch.launcher == "hand":
        return None
    nproc = run.nproc(report.node)
    said = launch.environment.get("OMP_NUM_THREADS", "")
    first = said.partition(",")[0].strip()
    is_set_by_torchrun = launch.mode != "env"
    if first.isdigit() and int(first) > 0:
        threads = int(first)
    elif not said and not is_set_by_torchrun:
        threads = host.num_cores
    else:
        return None
    if nproc * threads <= host.num_cores or threads == 1:
        return None  # one thread each is the least there is: lim.cgroup.cpu counts the ranks
    return (f"= {said}" if said else "is not set", threads, nproc, host.num_cores)
