"""port.oneway: a pair that connects in one direction only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks import firewall
from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.blame import Path
from rankscope.preflight.checks.pairs import arrows, gloo_dials, shortened, told_of
from rankscope.preflight.checks.ports.closed import closed_paths
from rankscope.preflight.facts.edges import DialClass
from rankscope.preflight.model import Finding, Scope, Tier


class PortOneway:
    """What is open from one node to another is open the other way around as well.

    gloo dials from the higher address to the lower one, NCCL in both directions: a path that is
    closed one way may work by luck, until the addresses or the backend change.
    """

    id: ClassVar[str] = "port.oneway"
    scope: ClassVar[Scope] = "pair"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Put paths of the same class and the same luck into one finding."""
        closed = closed_paths(run)
        groups: dict[tuple[DialClass, bool | None], list[Path]] = defaultdict(list)
        for one in closed.blamed:
            if closed.is_oneway(one):
                path = one.paths[0]
                groups[closed.outcome(one.paths), gloo_dials(run, *path)].append(path)
        for (outcome, is_used), paths in groups.items():
            told = [told_of(*path, closed.bad[path]) for path in paths]
            for start, end in paths:
                told.append(f"{end}->{start}  ok")
            if is_used is not None:
                start, end = paths[0] if is_used else paths[0][::-1]
                told.append(f"gloo dials {start}->{end}: the higher address dials the lower one")
            is_open = closed.has_open_port(paths)
            some = "random ports" if is_open else "tcp"
            yield Finding(
                id=self.id,
                status="fail",
                title=f"{arrows(paths)}: {outcome} on {some}, the other way around works",
                edges=tuple(paths),
                evidence={
                    "class": outcome,
                    "gloo_dials_this_way": is_used,
                    "is_master_port_open": is_open,
                    "elapsed_ms": max(d.elapsed_ms for path in paths for d in closed.bad[path]),
                },
                told=shortened(told),
                fix=tuple(
                    fix
                    for start, end in paths
                    for ports in self._ports(run, end, is_open)
                    for fix in firewall.open_inbound(run, end, (start,), ports, outcome)
                ),
                wrong_if="the rule is not at the called node: then the caller's outbound rules, "
                "a return route, or something on the way",
            )

    def _ports(self, run: Run, node: str, is_open: bool) -> list[str]:
        ranges = [firewall.ephemeral_range(run, node)]
        return ranges if is_open else [*ranges, str(run.master_port)]
