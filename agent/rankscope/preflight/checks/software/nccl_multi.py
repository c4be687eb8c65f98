"""sw.nccl.multi: more than one NCCL that a rank may load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed, not_measured
from rankscope.preflight.facts.software import SoftwareFacts
from rankscope.preflight.model import Finding, Fix, Scope, Tier


class SwNcclMulti:
    """There is one NCCL: LD_PRELOAD and LD_LIBRARY_PATH name no other than torch's own.

    Which of two a rank loads depends on the order of the loader.
    """

    id: ClassVar[str] = "sw.nccl.multi"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"torch", "gpu"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Warn where another version stands before the one that torch brings."""
        yield from not_measured(self.id, run, "software")
        bad: dict[tuple[str, ...], list[str]] = {}
        for report in run.present:
            software = report.facts.software
            if software is not None and (found := _others(software)):
                bad.setdefault(found, []).append(report.node)
        for others, nodes in bad.items():
            variable = others[0].rpartition(" by ")[2]
            yield Finding(
                id=self.id,
                status="warn",
                nodes=tuple(nodes),
                title=f"{listed(nodes)}: two versions of NCCL: torch brings {_own(run, nodes[0])}, "
                f"and {others[0]}",
                evidence={"others": list(others)},
                told=others,
                fix=tuple(Fix(node=node, command=f"unset {variable}") for node in nodes),
                would="ranks may load different versions of NCCL: init fails or hangs",
                wrong_if="the other one is meant, and set on all nodes",
                confidence="likely",
            )


def _own(run: Run, node: str) -> str:
    software = run.reports[node].facts.software
    return software.nccl if software is not None else ""


def _others(software: SoftwareFacts) -> tuple[str, ...]:
    """Return libraries of another version that the environment puts before torch's own."""
    return tuple(
        f"{library.path} is {library.version} by {library.found_by}"
        for library in software.libraries
        if library.found_by != "ldconfig"
        and software.nccl
        and library.version
        and not software.nccl.startswith(library.version)
    )
