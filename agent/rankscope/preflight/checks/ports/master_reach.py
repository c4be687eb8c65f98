"""port.master.reach: MASTER_PORT, where all nodes meet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks import firewall
from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.blame import Blame, Path, blame
from rankscope.preflight.checks.comparing import listed
from rankscope.preflight.checks.pairs import (
    CLOSED,
    SAYS,
    arrows,
    is_evidence,
    ordered,
    owners,
    shortened,
    silent,
    told_of,
    worst,
)
from rankscope.preflight.facts.edges import Dial, EdgeFacts
from rankscope.preflight.model import Finding, Scope, Tier


class PortMasterReach:
    """Every node can connect to MASTER_PORT of the node that holds it."""

    id: ClassVar[str] = "port.master.reach"
    scope: ClassVar[Scope] = "pair"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Blame the master's inbound side, a node's outbound side, or a pair."""
        holder = run.reports.get(run.master)
        if holder is None:
            return  # node.absent says so; a dial to nobody proves nothing
        owned = owners(run)
        bad: dict[Path, Dial] = {}
        tested: list[Path] = []
        lacking: list[str] = []
        for report in run.present:
            if report.node == run.master:
                continue
            edge = report.edges.get(run.master, EdgeFacts())
            dial = edge.master or edge.mesh
            if dial is None or dial.outcome == "unresolved":
                lacking.append(report.node)
                continue
            is_up = dial.port == holder.listening.master
            if dial.outcome == "ok":
                tested.append((report.node, run.master))
            elif dial.outcome in CLOSED and is_up and is_evidence(owned, run.master, dial):
                bad[report.node, run.master] = dial
                tested.append((report.node, run.master))
        for one in self._blamed(run, bad, tested):
            yield self._finding(run, one, bad)
        yield from silent(self.id, run, lacking)

    def _blamed(self, run: Run, bad: dict[Path, Dial], tested: list[Path]) -> list[Blame]:
        if len(bad) > 1 and len(bad) == len(tested):
            return [Blame("inbound", tuple(bad), (run.master,))]
        others = {
            (start, end): edge.mesh
            for start, _ in bad
            for end, edge in run.reports[start].edges.items()
            if end != run.master and end in run.reports and edge.mesh is not None
        }  # the same port of other nodes: what a node's own outbound side is judged by
        dead = [path for path, dial in others.items() if dial.outcome in CLOSED]
        found = blame([*bad, *dead], [*tested, *others])
        return [one for one in found if set(one.paths) & set(bad)]

    def _finding(self, run: Run, one: Blame, bad: dict[Path, Dial]) -> Finding:
        paths = tuple(path for path in one.paths if path in bad)
        sources = ordered(run, {start for start, _ in paths})
        outcome = worst([bad[path] for path in paths])
        port, master = bad[paths[0]].port, run.master
        inbound = firewall.open_inbound(run, master, sources, str(port), outcome)
        if one.side == "outbound":
            title = f"{listed(one.nodes)} reaches nobody's port {port}, {master}'s included"
            fix = firewall.open_outbound(run, one.nodes[0], str(port), outcome)
        elif one.side == "inbound":
            whom = "every node" if one.is_whole else listed(sources)
            title, fix = f"{master} {SAYS[outcome]} tcp port {port} from {whom}", inbound
        else:
            title = f"{arrows(paths)}: {outcome} on tcp port {port}, where all nodes meet"
            fix = inbound
        return Finding(
            id=self.id,
            status="fail",
            title=title,
            nodes=one.nodes,
            edges=paths,
            evidence={
                "class": outcome,
                "side": one.side,
                "port": port,
                "elapsed_ms": max(bad[path].elapsed_ms for path in paths),
                "errno": sorted({bad[path].errno for path in paths}),
            },
            told=(
                *shortened([told_of(*path, [bad[path]]) for path in paths]),
                f"{master}'s listener on port {port} was up",
            ),
            fix=fix,
            wrong_if=f"{master} has no such rule: then something on the way filters, such as a "
            "security group, and the port is to be opened there",
            confidence="proven" if one.nodes and one.is_whole else "likely",
        )
