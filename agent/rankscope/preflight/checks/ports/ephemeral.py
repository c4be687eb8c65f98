"""port.ephemeral: random ports, on which gloo and NCCL listen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks import firewall
from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.blame import Blame
from rankscope.preflight.checks.comparing import listed
from rankscope.preflight.checks.pairs import SAYS, arrows, ordered, shortened, silent, told_of
from rankscope.preflight.checks.ports.closed import Closed, closed_paths
from rankscope.preflight.facts.edges import DialClass
from rankscope.preflight.model import Finding, Fix, Scope, Tier

Group = tuple[str, DialClass, bool, bool]  # side, class, whether MASTER_PORT is open, whole
MAX_FIXES = 8  # nodes whose own commands are listed


class PortEphemeral:
    """Random ports are open between all nodes: gloo and NCCL listen on no others.

    There is no variable for NCCL's ports, so the whole range of the kernel must be open.
    """

    id: ClassVar[str] = "port.ephemeral"
    scope: ClassVar[Scope] = "pair"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Put nodes with the same side and class into one finding."""
        closed = closed_paths(run)
        groups: dict[Group, list[Blame]] = defaultdict(list)
        for one in closed.blamed:
            if not closed.is_oneway(one):
                outcome = closed.outcome(one.paths)
                is_known = one.nodes and one.side != "both"
                is_open = closed.has_open_port(one.paths)
                groups[one.side, outcome, is_open, bool(is_known) and one.is_whole].append(one)
        for (side, outcome, is_open, _), some in groups.items():
            yield self._finding(run, closed, some, (side, outcome, is_open))
        yield from silent(self.id, run, closed.lacking)
        for start, end in closed.doubtful:
            title = f"{start}->{end}: one of the random ports did not answer, the others did"
            yield Finding(id=self.id, status="unknown", title=title, edges=((start, end),))

    def _finding(
        self, run: Run, closed: Closed, some: list[Blame], about: tuple[str, DialClass, bool]
    ) -> Finding:
        side, outcome, is_open = about
        paths = tuple(dict.fromkeys(path for one in some for path in one.paths))
        nodes = ordered(run, {node for one in some for node in one.nodes})
        if side == "everywhere" and is_open:
            nodes = ordered(run, {end for _, end in paths})
        num = len(closed.bad[paths[0]])
        port = run.master_port
        lines = shortened(told_of(*path, closed.bad[path]) for path in paths)
        told = [*lines, f"the listeners were up: {num} ports of each node were tried"]
        if side == "tie":
            told.append("several answers are equally short: no node is named")
        if side == "everywhere" and not is_open:
            told.append("every path is closed: nobody can tell which node's firewall it is")
        return Finding(
            id=self.id,
            status="fail",
            title=_title(run, some[0], nodes, paths, about),
            nodes=nodes,
            edges=paths,
            evidence={
                "class": outcome, "side": side, "is_master_port_open": is_open, "ports": num,
                "range": {
                    end: firewall.ephemeral_range(run, end)
                    for end in dict.fromkeys(end for _, end in paths)
                },
                "elapsed_ms": max(d.elapsed_ms for path in paths for d in closed.bad[path]),
            },
            told=tuple(told),
            fix=_fixes(run, side, nodes, paths, outcome, "" if is_open else str(port)),
            wrong_if="no such rule is on the node: then something on the way filters, such as a "
            "security group, and the range is to be opened there",
            confidence="proven" if nodes and some[0].is_whole else "likely",
        )  # fmt: skip


def _title(
    run: Run, one: Blame, nodes: tuple[str, ...], paths: tuple[tuple[str, str], ...],
    about: tuple[str, DialClass, bool],
) -> str:  # fmt: skip
    side, outcome, is_open = about
    who, verb = listed(nodes), SAYS[outcome]
    verbs = verb if len(nodes) == 1 else _plural(verb)
    only = f"; only {run.master_port} is open" if is_open else ""
    what = "random ports" if is_open else f"all tcp ports, {run.master_port} included"
    if side == "inbound" or (side == "everywhere" and is_open):
        some = "" if one.is_whole else f" from {listed(ordered(run, {s for s, _ in paths}))}"
        return f"{who} {verbs} {what}{some}{only}"
    if side == "outbound":
        return f"{who} cannot dial {what} of other nodes ({outcome}){only}"
    if side == "both":
        return f"{who} {'is' if len(nodes) == 1 else 'are'} cut off: {outcome} on {what} both ways"
    if side == "everywhere":
        return f"no node reaches another: {outcome} on {what}, {len(paths)} paths"
    return f"{arrows(paths)}: {outcome} on {what}{only}"


def _plural(verb: str) -> str:
    return {"does not answer": "do not answer", "has no route for": "have no route for"}.get(
        verb, verb.removesuffix("s") if verb != "refuses" else "refuse"
    )


def _fixes(
    run: Run, side: str, nodes: tuple[str, ...], paths: tuple[tuple[str, str], ...],
    outcome: DialClass, master_port: str,
) -> tuple[Fix, ...]:  # fmt: skip
    fixes: list[Fix] = []
    where = nodes or ordered(run, {end for _, end in paths})
    callers: dict[str, set[str]] = defaultdict(set)
    for start, end in paths:
        callers[end].add(start)
    for node in where[:MAX_FIXES]:
        ports = [firewall.ephemeral_range(run, node)] + ([master_port] if master_port else [])
        sources = ordered(run, callers[node])
        for some in ports:
            if side in ("outbound", "both"):
                fixes += firewall.open_outbound(run, node, some, outcome)
            if side != "outbound":
                fixes += firewall.open_inbound(run, node, sources, some, outcome)
    if len(where) > MAX_FIXES:
        fixes.append(Fix(command=f"# the same on {len(where) - MAX_FIXES} more", owner="admin"))
    return tuple(dict.fromkeys(fixes))
