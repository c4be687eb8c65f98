"""proc.leftover: nothing of an earlier job holds ports or GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import not_measured
from rankscope.preflight.facts.ports import Leftover
from rankscope.preflight.model import Finding, Fix, NodeReport, Scope, Tier


class ProcLeftover:
    """No training process of yours is older than this job and still holds a port or a GPU."""

    id: ClassVar[str] = "proc.leftover"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset()

    def judge(self, run: Run) -> Iterator[Finding]:
        """Warn once for each node that has some."""
        yield from not_measured(self.id, run, "ports")
        for report in run.present:
            facts = report.facts.ports
            holder = facts.master_busy.pid if facts is not None and facts.master_busy else 0
            # who holds MASTER_PORT is port.master.free's
            left = [p for p in facts.leftovers if p.pid != holder] if facts is not None else []
            if left:
                yield self._finding(report, left)

    def _finding(self, report: NodeReport, left: list[Leftover]) -> Finding:
        first = left[0]
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        command = "kill " + " ".join(str(process.pid) for process in left[:16])
        return Finding(
            id=self.id,
            status="warn",
            nodes=(report.node,),
            title=f"{report.node}: pid {first.pid} {first.command[:60]}{more} of an earlier job "
            f"still holds {_holds(first)}",
            evidence={"processes": [_evidence(process) for process in left[:16]]},
            told=tuple(
                f"pid {p.pid}, {p.age_s / 60:.0f} min old, {_holds(p)}: {p.command[:80]}"
                for p in left[:4]
            ),
            fix=(Fix(node=report.node, command=command),),
            would="less GPU memory than you think, or EADDRINUSE when ports are asked for",
            wrong_if="another job of yours is meant to run on this machine",
            confidence="likely",
        )


def _holds(process: Leftover) -> str:
    parts = []
    if process.ports:
        parts.append("port " + ", ".join(map(str, process.ports[:4])))
    if process.gpus:
        parts.append("GPU " + ", ".join(map(str, process.gpus)))
    return " and ".join(parts)


def _evidence(process: Leftover) -> dict[str, object]:
    return {
        "pid": process.pid,
        "age_s": round(process.age_s, 1),
        "ports": list(process.ports),
        "gpus": list(process.gpus),
    }
