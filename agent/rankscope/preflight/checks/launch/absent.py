"""node.absent: who never reported."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed
from rankscope.preflight.checks.pairs import SEEN, shortened
from rankscope.preflight.facts.edges import Dial, DialClass
from rankscope.preflight.model import Finding, Fix, Scope, Tier


class NodeAbsent:
    """Every expected node has reported, over whatever carrier there is."""

    id: ClassVar[str] = "node.absent"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset()

    def judge(self, run: Run) -> Iterator[Finding]:
        """Put absent nodes that their peers see alike into one finding."""
        if not run.absent:
            return
        seen: dict[str, dict[str, Dial]] = {name: {} for name in run.absent}
        for start, end, edge in run.edges():
            dial = edge.mesh or edge.master
            if end in seen and dial is not None:
                seen[end][start] = dial
        groups: dict[frozenset[DialClass], list[str]] = defaultdict(list)
        for name, dials in seen.items():
            groups[frozenset(dial.outcome for dial in dials.values())].append(name)
        for outcomes, nodes in groups.items():
            yield self._finding(run, nodes, outcomes, seen)

    def _finding(
        self, run: Run, nodes: list[str], outcomes: frozenset[DialClass],
        seen: dict[str, dict[str, Dial]],
    ) -> Finding:  # fmt: skip
        told = [
            f"from {start}: {_sight(dial)}" for name in nodes for start, dial in seen[name].items()
        ]
        if not told:
            told = ["nobody who reported has tried to reach " + listed(nodes)]
        elif len(run.present) == 1 and len(run.expected) > 2:
            told.append(f"{run.present[0].node} hears nobody: it may itself be the one cut off")
        command = f"rankscope preflight --nodes {','.join(run.expected)}"
        if len(run.expected) > 16:
            command = "rankscope preflight  # with the same options as here"
        if run.master_port != 29500:
            command += f" --master-port {run.master_port}"
        fixes = [Fix(node=name, command=command) for name in nodes[:4]]
        if "drop" in outcomes or "prohibited" in outcomes or "refused" in outcomes:
            text = "rankscope preflight --share DIR  # if it runs there: another way to report"
            fixes.append(Fix(command=text))
        return Finding(
            id=self.id,
            status="fail",
            title=f"{listed(nodes)}: no report",
            nodes=tuple(nodes),
            edges=tuple((start, name) for name in nodes for start in seen[name]),
            evidence={
                "classes": sorted(outcomes),
                "num_reported": len(run.present),
                "num_expected": len(run.expected),
            },
            told=shortened(told),
            fix=tuple(fixes),
            wrong_if=f"the agent runs on {listed(nodes)}: then it cannot reach those who reported",
            confidence="likely",
        )


def _sight(dial: Dial) -> str:
    return SEEN[dial.outcome].format(
        address=dial.address, port=dial.port, elapsed_s=dial.elapsed_ms / 1e3,
        answered_by=dial.answered_by, errno=dial.errno,
    )  # fmt: skip
