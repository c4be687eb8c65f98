"""Random ports: closed, closed in part, closed one way, or answered by another program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any

from rankscope.preflight.checks import firewall
from rankscope.preflight.checks.base import BuiltinCheck, Run, listed
from rankscope.preflight.checks.blame import Blame, Path
from rankscope.preflight.checks.closed import (
    Closed,
    Hole,
    closed_paths,
    is_used,
    middle,
    rules_of,
    silent_words,
)
from rankscope.preflight.checks.pairs import (
    HOW,
    NO_PATH,
    SAYS,
    arrows,
    dial_line,
    gloo_dials,
    is_untried,
    ordered,
    shortened,
)
from rankscope.preflight.facts.edges import NUM_FLOWS, Dial, DialClass
from rankscope.preflight.model import CheckFinding, Fix

Group = tuple[str, DialClass, bool, bool, str]  # side, class, MASTER_PORT is open, whole, ports
MAX_FIXES = 8  # nodes whose own commands are listed
MAX_PORTS = 48  # in the evidence


class PortEphemeral(BuiltinCheck, id="port.ephemeral", scope="pair", needs=("peers",)):
    """Random ports are open between all nodes: gloo and NCCL listen on no others.

    There is no variable for NCCL's ports, so the whole range of the kernel must be open.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Put nodes with the same side and class into one finding."""
        closed = closed_paths(run)
        groups: dict[Group, list[Blame]] = defaultdict(list)
        for one in closed.blamed:
            if closed.vanish(one.paths):
                yield self._vanishing(run, closed, one)
            elif not closed.is_oneway(one):
                groups[self._group(run, closed, one)].append(one)
        for group, some in groups.items():
            yield self._finding(run, closed, some, group)
        yield from self.note("unknown", ordered(run, closed.lacking), NO_PATH)
        late = [
            (start, end)
            for start, end, edge in run.edges()
            if is_untried(run.reports.get(end), edge)
        ]
        if untried := [path for path in late if not {*path} & {*run.gone}]:
            title = f"{arrows(untried)}: not tried, as one of them came too late"
            yield self.unknown(title, edges=untried)
        if closed.doubtful:
            yield self.unknown(
                silent_words(closed.doubtful),
                edges=closed.doubtful,
            )

    def _vanishing(self, run: Run, closed: Closed, one: Blame) -> CheckFinding:
        """Report connections that vanish while others to the same ports pass."""
        numbers = {path: len(closed.bad[path]) for path in one.paths}
        where = {"inbound": "to", "outbound": "from", "both": "to and from"}.get(one.side, "")
        about = f"{where} {listed(one.nodes)}" if where else arrows(one.paths)
        text = (
            "# some of several ways there are dead: look at the members of its link bundle "
            "(cat /proc/net/bonding/*), at the switch's LACP counters, at ECMP routes"
        )
        return self.finding(
            "fail" if closed.breaks(run, one.paths) else "warn",
            f"some connections {about} vanish, others to the same ports pass",
            nodes=one.nodes,
            edges=one.paths,
            evidence={
                "class": "drop", "side": one.side, "is_by_connection": True,
                "vanished": {f"{start}->{end}": num for (start, end), num in numbers.items()},
                "tried": NUM_FLOWS,
            },
            lines=shortened(
                f"{start}->{end}  {num} of {NUM_FLOWS} connections got no answer to three SYNs"
                for (start, end), num in numbers.items()
            ),
            fix=[Fix(node=node, command=text, owner="admin") for node in one.nodes or ("",)],
            impact="gloo and NCCL open one connection or a few for each pair: each launch may "
            "hang, on another pair each time",
            unless="a limit on new connections drops them: then slower ones pass",
            confidence="proven" if one.nodes and one.is_whole else "likely",
        )  # fmt: skip

    def _group(self, run: Run, closed: Closed, one: Blame) -> Group:
        is_known = bool(one.nodes) and one.side != "both"
        return (
            one.side,
            closed.outcome(one.paths),
            closed.has_open_port(one.paths),
            is_known and one.is_whole,
            closed.hole(one.paths).words(),
        )

    def _finding(self, run: Run, closed: Closed, some: list[Blame], group: Group) -> CheckFinding:
        side, outcome, is_open, *_ = group
        paths = tuple(dict.fromkeys(path for one in some for path in one.paths))
        nodes = ordered(run, {node for one in some for node in one.nodes})
        if side == "everywhere" and is_open:
            nodes = ordered(run, {end for _, end in paths})
        hole = closed.hole(paths)
        fixes = (
            *_fixes(run, side, nodes, paths, outcome, "" if is_open else str(run.master_port)),
            *_redirected(run, closed, side, nodes, paths),
        )
        return self.finding(
            "fail" if closed.breaks(run, paths) else "warn",
            _title(run, some[0], nodes, paths, (side, outcome, is_open), hole),
            nodes=nodes,
            edges=paths,
            evidence={"side": side, **_evidence(run, closed, paths, hole)},
            lines=_lines(closed, paths, hole, side, is_open),
            fix=(*fixes, *(firewall.elsewhere(fixes) if side != "everywhere" else ())),
            unless="no such rule is on the node: then something on the way filters, such as a "
            "security group, and the range is to be opened there",
            confidence="proven" if nodes and some[0].is_whole else "likely",
        )


def _evidence(run: Run, closed: Closed, paths: tuple[Path, ...], hole: Hole) -> dict[str, Any]:
    evidence: dict[str, Any] = {
        "class": closed.outcome(paths),
        "is_master_port_open": closed.has_open_port(paths),
        "ports": len(closed.bad[paths[0]]),
        "ports_failed": list(hole.failed[:MAX_PORTS]),
        "ports_ok": list(hole.ok[:MAX_PORTS]),
        "range": {
            end: firewall.ephemeral_range(run, end)
            for end in dict.fromkeys(end for _, end in paths)
        },
        "elapsed_ms": max(d.elapsed_ms for path in paths for d in closed.bad[path]),
    }
    if hole.is_partial:
        evidence["ports_closed"] = f"{hole.failed[0]}-{hole.failed[-1]}"
        evidence["in_reach_of_gloo"] = any(
            min(d.port for d in closed.bad[path]) <= middle(run, path[1]) for path in paths
        )
    return evidence


def _lines(
    closed: Closed, paths: tuple[Path, ...], hole: Hole, side: str, is_open: bool
) -> list[str]:
    lines = list(shortened(dial_line(*path, closed.bad[path]) for path in paths))
    num = len(closed.bad[paths[0]])
    if hole.is_partial:
        lines.append(
            f"the listeners were up: {len(hole.failed)} ports are closed, {len(hole.ok)} are open"
        )
    else:
        lines.append(f"the listeners were up: {num} ports of each node were tried")
    if side == "tie":
        lines.append("several answers are equally short: no node is named")
    if side == "everywhere" and not is_open:
        lines.append("every path is closed: it is not known which node's firewall it is")
    return lines


def _title(
    run: Run, one: Blame, nodes: tuple[str, ...], paths: tuple[Path, ...],
    about: tuple[str, DialClass, bool], hole: Hole,
) -> str:  # fmt: skip
    side, outcome, is_open = about
    who, verb, how = listed(nodes), SAYS[outcome], HOW.get(outcome, outcome)
    verbs = verb if len(nodes) == 1 else _plural(verb)
    only = f"; only {run.master_port} is open" if is_open else ""
    what = "random ports" if is_open else f"all tcp ports, {run.master_port} included"
    if hole.is_partial:
        what, only = hole.words(), "; others are open"
    if side == "inbound" or (side == "everywhere" and is_open):
        some = "" if one.is_whole else f" from {listed(ordered(run, {s for s, _ in paths}))}"
        return f"{who} {verbs} {what}{some}{only}"
    if side == "outbound":
        return f"{who} cannot dial {what} of other nodes ({how}){only}"
    if side == "both":
        return f"{who} {'is' if len(nodes) == 1 else 'are'} cut off: {how} on {what} both ways"
    if side == "everywhere":
        return f"no node reaches another: {how} on {what}, {len(paths)} paths"
    return f"{arrows(paths)}: {how} on {what}{only}"


def _plural(verb: str) -> str:
    first, _, rest = verb.partition(" ")
    first = {"does": "do", "has": "have", "refuses": "refuse", "passes": "pass"}.get(
        first, first.removesuffix("s")
    )
    return f"{first} {rest}".strip()


def _fixes(
    run: Run, side: str, nodes: tuple[str, ...], paths: tuple[Path, ...],
    outcome: DialClass, master_port: str,
) -> tuple[Fix, ...]:  # fmt: skip
    """Return what opens these paths, at the nodes that are known, else at both ends."""
    fixes: list[Fix] = []
    peers: dict[str, set[str]] = defaultdict(set)
    callers: dict[str, set[str]] = defaultdict(set)
    for start, end in paths:
        callers[end].add(start)
        peers[start].add(end)
    where = nodes or ordered(run, set(callers))
    for node in where[:MAX_FIXES]:
        for ports in _ports(run, node, master_port):
            if side in ("outbound", "both") and peers[node]:
                fixes += firewall.open_outbound(run, node, peers[node], ports, outcome)
            if side == "inbound" or (side in ("both", "everywhere") and callers[node]):
                fixes += firewall.open_inbound(run, node, callers[node], ports, outcome)
            if side in ("pair", "tie"):
                fixes += firewall.open_path(run, callers[node], node, ports, outcome)
    if len(where) > MAX_FIXES:
        fixes.append(Fix(command=f"# the same on {len(where) - MAX_FIXES} more", owner="admin"))
    return tuple(dict.fromkeys(fixes))


def _redirected(
    run: Run, closed: Closed, side: str, nodes: tuple[str, ...], paths: tuple[Path, ...]
) -> Iterator[Fix]:
    """Yield exemptions where what looks closed may be redirected to a dead or silent proxy."""
    accepts_all = any(closed.edges[path].decoy == "ok" for path in paths)
    for node in nodes[:MAX_FIXES]:
        rules, way = rules_of(run, node), _way(side)
        known = rules is not None and (rules.redirects_in if way == "in" else rules.redirects_out)
        if known or (rules is None and accepts_all):
            at = 1 if way == "in" else 0
            peers = {path[1 - at] for path in paths if path[at] == node}
            ports = firewall.ephemeral_range(run, node)
            yield from firewall.exempt(run, node, peers, ports, way)


def _way(side: str) -> firewall.Way:
    return "out" if side == "outbound" else "in"


def _ports(run: Run, node: str, master_port: str) -> list[str]:
    return [firewall.ephemeral_range(run, node)] + ([master_port] if master_port else [])


class PortIntercepted(BuiltinCheck, id="port.intercepted", scope="pair", needs=("peers",)):
    """A call to the random ports of a node reaches that node, and no proxy on the way.

    The sidecar of a service mesh takes all connections of its container: gloo and NCCL then talk
    to it, and not to each other.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Put nodes whose connections are taken on the same side into one finding."""
        closed = closed_paths(run)
        groups: dict[str, list[Blame]] = defaultdict(list)
        for one in closed.intercepted:
            groups[one.side].append(one)
        for side, some in groups.items():
            yield self._finding(run, closed, some, side)

    def _finding(self, run: Run, closed: Closed, some: list[Blame], side: str) -> CheckFinding:
        paths = tuple(dict.fromkeys(path for one in some for path in one.paths))
        nodes = ordered(run, {node for one in some for node in one.nodes})
        if side == "everywhere":
            nodes = ordered(run, {start for start, _ in paths})
        said, is_open = _said(closed, paths), all(map(closed.answers, paths))
        first = closed.strange[paths[0]][0]
        return self.finding(
            "fail" if any(is_used(run, path) for path in paths) else "warn",
            f"{_whose(side, nodes, paths)} random ports: {said}",
            nodes=nodes,
            edges=paths,
            evidence={
                "class": first.outcome,
                "side": side,
                "banner": first.banner,
                "answered_by": first.answered_by,
                "ports": [dial.port for dial in closed.strange[paths[0]][:MAX_PORTS]],
                "accepts_all": any(closed.edges[path].decoy == "ok" for path in paths),
            },
            lines=self._lines(closed, paths),
            fix=_exempt(run, side, nodes, paths, "" if is_open else str(run.master_port)),
            confidence="proven" if nodes and some[0].is_whole else "likely",
        )

    def _lines(self, closed: Closed, paths: tuple[Path, ...]) -> Iterator[str]:
        yield from shortened(
            f"{start}->{end}  {_outcome(dials[0])} on {len(dials)} ports of {dials[0].address}"
            for (start, end), dials in ((path, closed.strange[path]) for path in paths)
        )
        if any(closed.edges[path].decoy == "ok" for path in paths):
            yield "a port on which no process listens is accepted as well"


def _said(closed: Closed, paths: Collection[Path]) -> str:
    """Return what answered there."""
    dials = [dial for path in paths for dial in closed.strange[path]]
    banner = next((dial.banner for dial in dials if dial.banner), "")
    other = next((dial.answered_by for dial in dials if dial.outcome == "wrong-host"), "")
    if other:
        return f"{other} answers in their place"
    if any(dial.outcome == "not-us" for dial in dials):
        return "another program answers" + (f" ({banner!r})" if banner else "")
    return "something accepts every connection and passes no data on"


def _outcome(dial: Dial) -> str:
    if dial.outcome == "wrong-host":
        return f"answered by {dial.answered_by}"
    if dial.outcome == "no-data":
        return f"accepted, no data ({dial.errno})"
    return f"answered {dial.banner!r}" if dial.banner else "answered by another program"


def _whose(side: str, nodes: tuple[str, ...], paths: tuple[Path, ...]) -> str:
    if side == "inbound":
        return f"calls to {listed(nodes)} on"
    if side in ("outbound", "everywhere"):
        verb = "dials" if len(nodes) == 1 else "dial"
        return f"{listed(nodes)} {verb} other nodes on"
    if side == "both":
        return f"to and from {listed(nodes)} on"
    return f"{arrows(paths)} on"


def _exempt(
    run: Run, side: str, nodes: tuple[str, ...], paths: tuple[Path, ...], master_port: str
) -> tuple[Fix, ...]:
    """Return what keeps the connections of the job out of the redirection."""
    fixes: list[Fix] = []
    starts = ordered(run, {start for start, _ in paths})
    ends = ordered(run, {end for _, end in paths})
    ways: list[tuple[firewall.Way, tuple[str, ...]]] = []
    if side != "inbound":
        ways.append(("out", nodes or starts))
    if side in ("inbound", "both", "pair", "tie"):
        ways.append(("in", nodes or ends))
    for way, where in ways:
        at = 0 if way == "out" else 1
        for node in where[:MAX_FIXES]:
            peers = {path[1 - at] for path in paths if path[at] == node}
            for ports in _ports(run, node, master_port) if peers else ():
                fixes += firewall.exempt(run, node, peers, ports, way)
    return tuple(dict.fromkeys(fixes))


class PortOneway(BuiltinCheck, id="port.oneway", scope="pair", needs=("peers",)):
    """What is open from one node to another is open the other way around as well.

    gloo dials from the higher address to the lower one, NCCL in both directions: a path that is
    closed one way may work by luck, until the addresses or the backend change.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Put paths of the same class, ports and luck into one finding."""
        closed = closed_paths(run)
        groups: dict[tuple[DialClass, bool | None, str], list[Path]] = defaultdict(list)
        for one in closed.blamed:
            if closed.is_oneway(one) and not closed.vanish(one.paths):
                path, words = one.paths[0], closed.hole(one.paths).words()
                groups[closed.outcome(one.paths), gloo_dials(run, *path), words].append(path)
        for (outcome, luck, _), paths in groups.items():
            yield self._finding(run, closed, tuple(paths), outcome, luck)

    def _finding(
        self, run: Run, closed: Closed, paths: tuple[Path, ...], outcome: DialClass,
        is_dialled: bool | None,
    ) -> CheckFinding:  # fmt: skip
        lines = [dial_line(*path, closed.bad[path]) for path in paths]
        for start, end in paths:
            lines.append(f"{end}->{start}  ok")
        if is_dialled is not None:
            start, end = paths[0] if is_dialled else paths[0][::-1]
            lines.append(f"gloo dials {start}->{end}: the higher address dials the lower one")
        is_open, hole = closed.has_open_port(paths), closed.hole(paths)
        some = hole.words() if is_open or hole.is_partial else "tcp"
        fixes = [
            fix
            for start, end in paths
            for ports in _ports(run, end, "" if is_open else str(run.master_port))
            for fix in firewall.open_path(run, (start,), end, ports, outcome)
        ]
        return self.finding(
            "fail" if closed.breaks(run, paths) else "warn",
            f"{arrows(paths)}: {HOW.get(outcome, outcome)} on {some}, the other way around works",
            edges=paths,
            evidence={
                "gloo_dials_this_way": is_dialled,
                **_evidence(run, closed, paths, hole),
            },
            lines=shortened(lines),
            fix=(*fixes, *firewall.elsewhere(fixes)),
            unless="the rule is at neither node: then a return route, or something on the way",
        )
