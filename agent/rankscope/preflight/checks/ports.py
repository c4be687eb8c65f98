"""Ports: MASTER_PORT, random ports, connection tracking, what earlier jobs left."""

from __future__ import annotations

import shlex
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from rankscope.preflight.checks import firewall
from rankscope.preflight.checks.base import BuiltinCheck, Run, listed, on_each
from rankscope.preflight.checks.blame import Blame, Path, blame
from rankscope.preflight.checks.pairs import (
    CLOSED,
    NO_PATH,
    SAYS,
    arrows,
    dial_line,
    gloo_dials,
    is_evidence,
    ordered,
    owners,
    shortened,
    worst,
)
from rankscope.preflight.facts.edges import Dial, DialClass, EdgeFacts
from rankscope.preflight.facts.launch import Mode
from rankscope.preflight.facts.ports import PortOwner
from rankscope.preflight.facts.processes import Leftover
from rankscope.preflight.model import CheckFinding, Fix, NodeReport


@dataclass(frozen=True)
class Closed:
    """The closed paths of a run, with the dials that show it."""

    bad: dict[Path, tuple[Dial, ...]]  # those that failed
    good: frozenset[Path]
    blamed: tuple[Blame, ...]
    lacking: tuple[str, ...]  # nodes that tried no path
    doubtful: tuple[Path, ...]  # one silent port among open ones: a lost packet looks the same
    open_doors: frozenset[Path]  # closed for random ports, but the control port answers

    def is_oneway(self, one: Blame) -> bool:
        """Return whether this is a pair that works the other way around."""
        (start, end), *more = one.paths
        return one.side == "pair" and not more and (end, start) in self.good

    def outcome(self, paths: Collection[Path]) -> DialClass:
        """Return how most dials of these paths ended."""
        return worst([dial for path in paths for dial in self.bad[path]])

    def has_open_port(self, paths: Collection[Path]) -> bool:
        """Return whether the control port answers on all of these paths."""
        return all(path in self.open_doors for path in paths)


def closed_paths(run: Run) -> Closed:
    """Evaluate every path by its dials to ports on which the peer's agent says that it listens."""
    owned = owners(run)
    bad: dict[Path, tuple[Dial, ...]] = {}
    good: list[Path] = []
    lacking: list[str] = []
    doubtful: list[Path] = []
    doors: list[Path] = []
    for report in run.present:
        num_tried = 0
        for peer, edge in report.edges.items():
            holder = run.reports.get(peer)
            if holder is None:
                continue
            dials = _evident(edge, holder, owned)
            failed = tuple(dial for dial in dials if dial.outcome in CLOSED)
            num_tried += bool(dials)
            path = (report.node, peer)
            if dials and not failed:
                good.append(path)
            elif len(failed) == 1 < len(dials) and failed[0].outcome == "drop" and _may_lose(edge):
                doubtful.append(path)
            elif failed:
                bad[path] = failed
                if any(d is not None and d.outcome == "ok" for d in (edge.mesh, edge.master)):
                    doors.append(path)
        if not num_tried and len(run.reports) > 1:
            lacking.append(report.node)
    return Closed(
        bad=bad,
        good=frozenset(good),
        blamed=tuple(blame(bad, [*bad, *good])),
        lacking=tuple(lacking),
        doubtful=tuple(doubtful),
        open_doors=frozenset(doors),
    )


def _may_lose(edge: EdgeFacts) -> bool:
    """Return whether packets get lost here, or may for all we know."""
    sent = edge.bandwidth
    return sent is None or sent.num_segments == 0 or sent.num_retransmits > 0


def _evident(
    edge: EdgeFacts, holder: NodeReport, owned: Mapping[str, frozenset[str]]
) -> tuple[Dial, ...]:
    return tuple(
        dial
        for dial in edge.ephemeral
        if dial.port in holder.listening.ephemeral and is_evidence(owned, holder.node, dial)
    )


_PRIVILEGED = 1024  # ip_unprivileged_port_start, as Linux sets it
_TAKEN: dict[Mode, str] = {
    "static": "node 0 ends with EADDRINUSE; the others hang without output, for more than 30 min",
    "c10d": "nothing on any node for more than 30 min",
    "env": "rank 0 ends with EADDRINUSE; the others wait 30 min",
}


class PortMasterFree(BuiltinCheck, id="port.master.free"):
    """MASTER_PORT can be bound at the master."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail where another process holds it, with the process."""
        report = run.reports.get(run.master)
        if report is None:
            yield self.unknown(f"the master, {run.master or 'whichever it is'}, has not reported")
            return
        facts = report.facts.ports
        if facts is None:
            yield from (f for f in self.not_measured(run, "ports") if run.master in f.nodes)
            return
        owner = facts.master_busy
        if owner is None:
            yield from _not_bound(run, report)
            return
        if owner.is_launcher:
            yield self.skipped(
                f"{owner.command.partition(' ')[0]} of this launch holds port {owner.port}",
                nodes=(run.master,),
            )
            return
        yield self._finding(run, report, owner)

    def _finding(self, run: Run, report: NodeReport, owner: PortOwner) -> CheckFinding:
        return self.fail(
            f"port {owner.port} is held by {_who(report, owner)}",
            at=(run.master,),
            evidence={
                "port": owner.port,
                "pid": owner.pid,
                "command": owner.command,
                "user": owner.user,
                "age_s": round(owner.age_s, 1),
            },
            lines=(f"ss -ltnp 'sport = :{owner.port}' on {run.master} shows it, too",),
            fix=_master_free_fixes(run, report, owner),
            impact=_TAKEN[run.mode],
        )


def _not_bound(run: Run, report: NodeReport) -> Iterator[CheckFinding]:
    """Report a port that could not be bound though no process listens on it."""
    is_root = report.facts.host is not None and report.facts.host.is_root
    if not report.listening.mesh or report.listening.master:
        return  # it was bound, or nothing was: this preflight has no listeners
    port = run.master_port
    title = f"{run.master}: port {port} could not be bound, and no process is seen to listen on it"
    if port < _PRIVILEGED and not is_root:
        title = f"{run.master}: ports below {_PRIVILEGED}, like {port}, are for root alone"
        fix = Fix(command="torchrun --master-port 29500 ...")
        yield PortMasterFree.fail(
            title,
            nodes=(run.master,),
            evidence={"port": port},
            fix=(fix,),
            impact="node 0 ends with EACCES; the others wait",
            unless="net.ipv4.ip_unprivileged_port_start is lower",
            confidence="likely",
        )
    else:
        yield PortMasterFree.unknown(title, nodes=(run.master,))


def _who(report: NodeReport, owner: PortOwner) -> str:
    me = report.facts.host.user if report.facts.host is not None else ""
    if not owner.pid:
        return f"a process of {owner.user or 'another user'}, which cannot be seen from here"
    whose = "you" if owner.user and owner.user == me else owner.user or "another user"
    since = ""
    if owner.age_s > 0 and report.started_unix_s > 0:
        # the node's own wall clock; its date where it is another day
        began = time.gmtime(report.started_unix_s - owner.age_s)
        form = "%H:%M UTC" if owner.age_s < 86400 else "%Y-%m-%d %H:%M UTC"
        since = f", since {time.strftime(form, began)}"
    return f"pid {owner.pid} {owner.command} ({whose}{since})"


def _master_free_fixes(run: Run, report: NodeReport, owner: PortOwner) -> Iterator[Fix]:
    me = report.facts.host.user if report.facts.host is not None else ""
    if owner.pid and owner.user == me:
        yield Fix(node=run.master, command=f"kill {owner.pid}  # {shlex.quote(owner.command)[:60]}")
    elif owner.pid:
        yield Fix(node=run.master, command=f"sudo kill {owner.pid}", owner="admin")
    yield _take_port(run, owner.port + 1 if owner.port < 65535 else owner.port - 1)


def _take_port(run: Run, port: int) -> Fix:
    """Return the setting that has the job meet on `port`."""
    if run.mode == "env":
        return Fix(command=f"export MASTER_PORT={port}")
    if run.mode == "c10d":
        return Fix(command=f"torchrun --rdzv-endpoint {run.master}:{port} ...")
    return Fix(command=f"torchrun --master-port {port} ...")


class PortMasterReach(BuiltinCheck, id="port.master.reach", scope="pair", needs=("peers",)):
    """Every node can connect to MASTER_PORT of the node that holds it."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Blame the master's inbound side, a node's outbound side, or a pair."""
        holder = run.reports.get(run.master)
        if holder is None:
            return  # node.absent says so; a dial to an absent node proves nothing
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
        yield from self.note("unknown", ordered(run, lacking), NO_PATH)

    def _blamed(self, run: Run, bad: dict[Path, Dial], tested: list[Path]) -> list[Blame]:
        if len(bad) > 1 and len(bad) == len(tested):
            return [Blame("inbound", tuple(bad), (run.master,))]
        others = {
            (start, end): edge.mesh
            for start, _ in bad
            for end, edge in run.reports[start].edges.items()
            if end != run.master and end in run.reports and edge.mesh is not None
        }  # the same port of other nodes: evidence about a node's own outbound side
        dead = [path for path, dial in others.items() if dial.outcome in CLOSED]
        found = blame([*bad, *dead], [*tested, *others])
        return [one for one in found if set(one.paths) & set(bad)]

    def _finding(self, run: Run, one: Blame, bad: dict[Path, Dial]) -> CheckFinding:
        paths = tuple(path for path in one.paths if path in bad)
        sources = ordered(run, {start for start, _ in paths})
        outcome = worst([bad[path] for path in paths])
        port, master = bad[paths[0]].port, run.master
        inbound = firewall.open_inbound(run, master, sources, str(port), outcome)
        if one.side == "outbound":
            title = f"{listed(one.nodes)} reaches port {port} of no node, {master}'s included"
            fix = firewall.open_outbound(run, one.nodes[0], str(port), outcome)
        elif one.side == "inbound":
            whom = "every node" if one.is_whole else listed(sources)
            title, fix = f"{master} {SAYS[outcome]} tcp port {port} from {whom}", inbound
        else:
            title = f"{arrows(paths)}: {outcome} on tcp port {port}, where all nodes meet"
            fix = inbound
        return self.fail(
            title,
            nodes=one.nodes,
            edges=paths,
            evidence={
                "class": outcome,
                "side": one.side,
                "port": port,
                "elapsed_ms": max(bad[path].elapsed_ms for path in paths),
                "errno": sorted({bad[path].errno for path in paths}),
            },
            lines=(
                *shortened([dial_line(*path, [bad[path]]) for path in paths]),
                f"{master}'s listener on port {port} was up",
            ),
            fix=fix,
            unless=f"{master} has no such rule: then something on the way filters, such as a "
            "security group, and the port is to be opened there",
            confidence="proven" if one.nodes and one.is_whole else "likely",
        )


class PortMasterIdentity(BuiltinCheck, id="port.master.identity", scope="pair", needs=("peers",)):
    """Who answers on MASTER_PORT is the node that holds it, and no other program.

    A store that talks to a web server waits without a word: c10d printed nothing for 33 minutes.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Group by what answered, and where."""
        groups: dict[tuple[str, str, str], dict[str, Dial]] = defaultdict(dict)
        for report in run.present:
            dial = report.edges.get(run.master, EdgeFacts()).master
            if dial is not None and dial.outcome in ("not-us", "wrong-host"):
                who = dial.answered_by if dial.outcome == "wrong-host" else ""
                groups[dial.outcome, dial.address, who][report.node] = dial
        for (outcome, address, who), dials in groups.items():
            one = next(iter(dials.values()))
            where = f"{address}:{one.port}"
            if outcome == "wrong-host":
                title = f"{where} is answered by {who}, not by {run.master}"
                fix = Fix(node=who, command=f"ip -br address | grep -w {address}")
            else:
                said = f": {one.banner!r}" if one.banner else ""
                title = f"another program answers on {where} of {run.master}{said}"
                fix = Fix(node=run.master, command=f"sudo ss -ltnp 'sport = :{one.port}'")
            yield self.fail(
                title,
                nodes=(who or run.master,),
                edges=((node, run.master) for node in dials),
                evidence={
                    "class": outcome,
                    "address": address,
                    "port": one.port,
                    "answered_by": who,
                    "banner": one.banner,
                },
                lines=shortened([f"seen from {listed(list(dials))}"]),
                fix=(fix, Fix(command=f"export MASTER_PORT={_other(run, one.port)}")),
                unless="a proxy in between answers before it has reached the node",
            )


def _other(run: Run, port: int) -> int:
    """Return a port beside the taken one, which is below every usual range of random ports."""
    taken = {port} | {r.listening.mesh for r in run.present}
    return next(other for other in range(29400, 30000) if other not in taken)


_SAFE = 29500  # torchrun's default; IANA has not assigned 29400 to 29999


class PortMasterRange(BuiltinCheck, id="port.master.range"):
    """MASTER_PORT is outside the range of ports that the kernel hands out."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn where any outgoing connection of the master may take the port first."""
        report = run.reports.get(run.master)
        facts = report.facts.ports if report is not None else None
        if facts is None or not facts.range_high:
            yield self.unknown("the range of ephemeral ports of the master is not known")
            return
        port = run.master_port
        if not facts.range_low <= port <= facts.range_high:
            return
        free = _SAFE if not facts.range_low <= _SAFE <= facts.range_high else facts.range_low - 1
        yield self.warn(
            f"MASTER_PORT {port} is in the ephemeral range {facts.range_low}-{facts.range_high}",
            at=(run.master,),
            evidence={"port": port, "range_low": facts.range_low, "range_high": facts.range_high},
            fix=(_take_port(run, free),),
            impact="now and then: EADDRINUSE at the start, because another program got this port",
            unless="net.ipv4.ip_local_reserved_ports holds it",
            confidence="likely",
        )


Group = tuple[str, DialClass, bool, bool]  # side, class, whether MASTER_PORT is open, whole
MAX_FIXES = 8  # nodes whose own commands are listed


class PortEphemeral(BuiltinCheck, id="port.ephemeral", scope="pair", needs=("peers",)):
    """Random ports are open between all nodes: gloo and NCCL listen on no others.

    There is no variable for NCCL's ports, so the whole range of the kernel must be open.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
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
        yield from self.note("unknown", ordered(run, closed.lacking), NO_PATH)
        for start, end in closed.doubtful:
            yield self.unknown(
                f"{start}->{end}: one of the random ports did not answer, the others did",
                edges=((start, end),),
            )

    def _finding(
        self, run: Run, closed: Closed, some: list[Blame], about: tuple[str, DialClass, bool]
    ) -> CheckFinding:
        side, outcome, is_open = about
        paths = tuple(dict.fromkeys(path for one in some for path in one.paths))
        nodes = ordered(run, {node for one in some for node in one.nodes})
        if side == "everywhere" and is_open:
            nodes = ordered(run, {end for _, end in paths})
        num = len(closed.bad[paths[0]])
        port = run.master_port
        lines = shortened(dial_line(*path, closed.bad[path]) for path in paths)
        evidence = [*lines, f"the listeners were up: {num} ports of each node were tried"]
        if side == "tie":
            evidence.append("several answers are equally short: no node is named")
        if side == "everywhere" and not is_open:
            evidence.append("every path is closed: it is not known which node's firewall it is")
        return self.fail(
            _title(run, some[0], nodes, paths, about),
            nodes=nodes,
            edges=paths,
            evidence={
                "class": outcome,
                "side": side,
                "is_master_port_open": is_open,
                "ports": num,
                "range": {
                    end: firewall.ephemeral_range(run, end)
                    for end in dict.fromkeys(end for _, end in paths)
                },
                "elapsed_ms": max(d.elapsed_ms for path in paths for d in closed.bad[path]),
            },
            lines=evidence,
            fix=_ephemeral_fixes(run, side, nodes, paths, outcome, "" if is_open else str(port)),
            unless="no such rule is on the node: then something on the way filters, such as a "
            "security group, and the range is to be opened there",
            confidence="proven" if nodes and some[0].is_whole else "likely",
        )


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


def _ephemeral_fixes(
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


class PortOneway(BuiltinCheck, id="port.oneway", scope="pair", needs=("peers",)):
    """What is open from one node to another is open the other way around as well.

    gloo dials from the higher address to the lower one, NCCL in both directions: a path that is
    closed one way may work by luck, until the addresses or the backend change.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Put paths of the same class and the same luck into one finding."""
        closed = closed_paths(run)
        groups: dict[tuple[DialClass, bool | None], list[Path]] = defaultdict(list)
        for one in closed.blamed:
            if closed.is_oneway(one):
                path = one.paths[0]
                groups[closed.outcome(one.paths), gloo_dials(run, *path)].append(path)
        for (outcome, is_used), paths in groups.items():
            lines = [dial_line(*path, closed.bad[path]) for path in paths]
            for start, end in paths:
                lines.append(f"{end}->{start}  ok")
            if is_used is not None:
                start, end = paths[0] if is_used else paths[0][::-1]
                lines.append(f"gloo dials {start}->{end}: the higher address dials the lower one")
            is_open = closed.has_open_port(paths)
            some = "random ports" if is_open else "tcp"
            yield self.fail(
                f"{arrows(paths)}: {outcome} on {some}, the other way around works",
                edges=paths,
                evidence={
                    "class": outcome,
                    "gloo_dials_this_way": is_used,
                    "is_master_port_open": is_open,
                    "elapsed_ms": max(d.elapsed_ms for path in paths for d in closed.bad[path]),
                },
                lines=shortened(lines),
                fix=(
                    fix
                    for start, end in paths
                    for ports in self._ports(run, end, is_open)
                    for fix in firewall.open_inbound(run, end, (start,), ports, outcome)
                ),
                unless="the rule is not at the called node: then the caller's outbound rules, "
                "a return route, or something on the way",
            )

    def _ports(self, run: Run, node: str, is_open: bool) -> list[str]:
        ranges = [firewall.ephemeral_range(run, node)]
        return ranges if is_open else [*ranges, str(run.master_port)]


# connections of one rank to one other: gloo has one in each process group (default, and some
# of meshes), NCCL's sockets up to 8 a channel, for the peers in its rings and trees only
_PER_PAIR = 4
_PORTS_RATIO = 0.5  # other programs need ports, too, and closed ones wait for a minute


class PortCount(BuiltinCheck, id="port.count", needs=("peers",)):
    """The range of ephemeral ports is wide enough for the connections of all ranks."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn where they would fill half of it."""
        yield from self.not_measured(run, "ports")
        world = sum(run.nproc(node) for node in run.expected)
        tight: dict[tuple[int, int, int], list[str]] = {}
        for node, facts in run.each(lambda facts: facts.ports).items():
            if not facts.range_high:
                continue
            nproc = run.nproc(node)
            needed = _PER_PAIR * nproc * (world - nproc) + max(0, facts.num_time_wait)
            size = facts.range_high - facts.range_low + 1
            if needed > _PORTS_RATIO * size:
                key = (needed, size, max(0, facts.num_time_wait))
                tight.setdefault(key, []).append(node)
        command = "sudo sysctl -w net.ipv4.ip_local_port_range='30000 65535'"
        for (needed, size, waiting), nodes in tight.items():
            yield self.warn(
                f"about {needed} ports needed, the range has {size}",
                at=nodes,
                evidence={"num_needed": needed, "num_ports": size, "num_time_wait": waiting},
                fix=(Fix(command=command, owner="admin"),),
                impact="'Cannot assign requested address' while process groups are made",
                unless="the job makes few process groups",
                confidence="likely",
            )


_CONNTRACK_RATIO = 0.8


class PortConntrack(BuiltinCheck, id="port.conntrack"):
    """The table in which the firewall follows connections is at most 80 % full."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn where new connections will soon be dropped."""
        yield from self.not_measured(run, "ports")
        without = []
        for node, facts in run.each(lambda facts: facts.ports).items():
            if facts.conntrack_max <= 0 or facts.conntrack_count < 0:
                without.append(node)
            elif facts.conntrack_count > _CONNTRACK_RATIO * facts.conntrack_max:
                count, room = facts.conntrack_count, facts.conntrack_max
                command = f"sudo sysctl -w net.netfilter.nf_conntrack_max={4 * room}"
                yield self.warn(
                    f"{count} of {room} tracked connections are in use",
                    at=(node,),
                    evidence={"num_tracked": count, "num_max": room},
                    fix=on_each((node,), command, "admin"),
                    impact="'nf_conntrack: table full, dropping packet': connections time out "
                    "by chance",
                    unless="the rules do not track the ports of this job",
                )
        title = "no table of connections to be seen (nf_conntrack)"
        yield from self.note("skipped", without, title)


class ProcLeftover(BuiltinCheck, id="proc.leftover"):
    """No training process of yours is older than this job and still holds a port or a GPU."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn once for each node that has some."""
        yield from self.not_measured(run, "ports")
        for node, facts in run.each(lambda facts: facts.ports).items():
            # who holds MASTER_PORT is port.master.free's
            holder = facts.master_busy.pid if facts.master_busy else 0
            left = [process for process in facts.leftovers if process.pid != holder]
            if left:
                yield self._finding(node, left)

    def _finding(self, node: str, left: list[Leftover]) -> CheckFinding:
        first = left[0]
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        command = "kill " + " ".join(str(process.pid) for process in left[:16])
        return self.warn(
            f"pid {first.pid} {first.command[:60]}{more} of an earlier job "
            f"still holds {_holds(first)}",
            at=(node,),
            evidence={"processes": [_evidence(process) for process in left[:16]]},
            lines=(
                f"pid {p.pid}, {p.age_s / 60:.0f} min old, {_holds(p)}: {p.command[:80]}"
                for p in left[:4]
            ),
            fix=on_each((node,), command),
            impact="less GPU memory than you think, or EADDRINUSE when ports are asked for",
            unless="another job of yours is meant to run on this machine",
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
