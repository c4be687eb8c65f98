"""sw.backend: this build of torch has the backend that the job needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed
from rankscope.preflight.model import Finding, Fix, Scope, Tier


class SwBackend:
    """torch on every node has the backend that the job needs."""

    id: ClassVar[str] = "sw.backend"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "default"
    needs: ClassVar[frozenset[Need]] = frozenset({"torch", "smoke"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail where the torch child says that it was built without."""
        bad: dict[str, tuple[str, ...]] = {}
        untold: list[str] = []
        for report in run.present:
            smoke = report.facts.smoke
            if smoke is None or smoke.skipped or not smoke.backends:
                untold.append(report.node)
            elif run.backend not in smoke.backends:
                bad[report.node] = smoke.backends
        if untold:
            title = f"{listed(untold)}: torch was not asked for its backends"
            yield Finding(id=self.id, status="unknown", nodes=tuple(untold), title=title)
        if bad:
            yield Finding(
                id=self.id,
                status="fail",
                nodes=tuple(bad),
                title=f"{listed(bad)}: torch was built without {run.backend}",
                evidence={"backends": {node: list(names) for node, names in bad.items()}},
                told=tuple(f"{node}: {', '.join(names)}" for node, names in bad.items()),
                fix=tuple(
                    Fix(node=node, command="python -m pip install --force-reinstall torch")
                    for node in bad
                ),
                would=f"init_process_group fails: torch has no {run.backend.upper()} built in",
                wrong_if="the job uses another backend: say --backend",
            )
