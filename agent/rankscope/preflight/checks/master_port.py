"""MASTER_PORT: free at its node, reachable from the others, and held by no other program."""

from __future__ import annotations

import shlex
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from rankscope.preflight.checks import firewall
from rankscope.preflight.checks.base import BuiltinCheck, Run, listed
from rankscope.preflight.checks.blame import Blame, Path, blame
from rankscope.preflight.checks.closed import STRANGERS, has_lived, rules_of, silent_words
from rankscope.preflight.checks.pairs import (
    CLOSED,
    HOW,
    NO_PATH,
    SAYS,
    arrows,
    dial_line,
    is_evidence,
    is_untried,
    ordered,
    owners,
    shortened,
    worst,
)
from rankscope.preflight.facts.edges import Dial, EdgeFacts
from rankscope.preflight.facts.launch import Mode
from rankscope.preflight.facts.ports import PortOwner
from rankscope.preflight.model import CheckFinding, Fix, NodeReport

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
    elif report.listening.master_error == "EADDRINUSE":
        yield PortMasterFree.fail(
            f"port {port} is bound by a program that does not listen on it",
            at=(run.master,),
            evidence={"port": port, "errno": "EADDRINUSE"},
            lines=("bind: EADDRINUSE, twice; ss -ltn does not show such sockets",),
            fix=(_take_port(run, _beside(port)),),
            impact=_TAKEN[run.mode],
            unless="the program that holds it has ended since",
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
    """Yield another port; what holds this one is ended only if it is left over from training."""
    ports = report.facts.ports
    left = [one.pid for one in ports.leftovers] if ports is not None else []
    if owner.pid and owner.pid in left:
        yield Fix(node=run.master, command=f"kill {owner.pid}")
    yield _take_port(run, _beside(owner.port))


def _beside(port: int) -> int:
    return port + 1 if port < 65535 else port - 1


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
        good: list[Path] = []
        lacking: list[str] = []
        doubtful: list[Path] = []
        for report in (one for one in run.present if one.node != run.master):
            path = (report.node, run.master)
            edge = report.edges.get(run.master, EdgeFacts())
            dial = edge.master or edge.mesh
            if dial is None or dial.outcome == "unresolved" or _is_early(run, edge):
                lacking.append(report.node)
            elif dial.outcome == "no-data" and not has_lived((report, holder)):
                doubtful.append(path)
            elif dial.outcome == "ok":
                good.append(path)
            elif _is_closed(dial, holder) and is_evidence(owned, run.master, dial):
                bad[path] = dial
        for one in self._blamed(run, bad, [*bad, *good]):
            yield self._finding(run, one, bad)
        yield from self.note("unknown", ordered(run, lacking), NO_PATH)
        if doubtful:
            yield self.unknown(silent_words(doubtful), edges=doubtful)

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
        if one.side == "outbound":
            title = f"{listed(one.nodes)} reaches port {port} of no node, {master}'s included"
            peers = {end for _, end in one.paths}
            fix = firewall.open_outbound(run, one.nodes[0], peers, str(port), outcome)
        elif one.side == "inbound":
            whom = "every node" if one.is_whole else listed(sources)
            title = f"{master} {SAYS[outcome]} tcp port {port} from {whom}"
            fix = firewall.open_inbound(run, master, sources, str(port), outcome)
        else:
            how = HOW.get(outcome, outcome)
            title = f"{arrows(paths)}: {how} on tcp port {port}, where all nodes meet"
            fix = firewall.open_path(run, sources, master, str(port), outcome)
        if outcome == "no-data":
            fix = (*fix, *_proxies(run, one, port))
        fix = (*fix, *firewall.elsewhere(fix))
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


def _proxies(run: Run, one: Blame, port: int) -> Iterator[Fix]:
    """Yield what exempts the port from a redirection, where there may be one to a silent proxy."""
    for node in one.nodes:
        rules, is_out = rules_of(run, node), one.side == "outbound"
        if rules is None or (rules.redirects_out if is_out else rules.redirects_in):
            peers = {end if is_out else start for start, end in one.paths}
            yield from firewall.exempt(run, node, peers, str(port), "out" if is_out else "in")


def _is_early(run: Run, edge: EdgeFacts) -> bool:
    """Return whether a node called the master only before it listened."""
    return edge.master is None and is_untried(run.reports.get(run.master), edge)


def _is_closed(dial: Dial, holder: NodeReport) -> bool:
    """Return whether a dial failed though the master listens there."""
    return dial.outcome in CLOSED and dial.port == holder.listening.master


class PortMasterIdentity(BuiltinCheck, id="port.master.identity", scope="pair", needs=("peers",)):
    """Who answers on MASTER_PORT is the node that holds it, and no other program.

    A store that talks to a web server waits without a word: c10d printed nothing for 33 minutes.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Group by what answered, and where."""
        groups: dict[tuple[str, str, str], dict[str, Dial]] = defaultdict(dict)
        reached: list[str] = []
        for report in run.present:
            dial = report.edges.get(run.master, EdgeFacts()).master
            if dial is not None and dial.outcome in STRANGERS:
                who = dial.answered_by if dial.outcome == "wrong-host" else ""
                groups[dial.outcome, dial.address, who][report.node] = dial
            elif dial is not None and dial.outcome == "ok":
                reached.append(report.node)
        for (outcome, address, who), dials in groups.items():
            one = next(iter(dials.values()))
            if outcome == "wrong-host":
                title = f"{address}:{one.port} is answered by {who}, not by {run.master}"
                fix = (Fix(node=who, command=f"ip -br address | grep -w {shlex.quote(address)}"),)
                yield self._finding(run, dials, title, (who,), fix)
            elif _listens(run, one.port):
                yield self._on_the_way(run, dials, reached)
            else:
                said = f": {one.banner!r}" if one.banner else ""
                title = f"another program answers on {address}:{one.port} of {run.master}{said}"
                fix = (Fix(node=run.master, command=f"sudo ss -ltnp 'sport = :{one.port}'"),)
                yield self._finding(run, dials, title, (run.master,), fix)

    def _on_the_way(
        self, run: Run, dials: Mapping[str, Dial], reached: Collection[str]
    ) -> CheckFinding:
        """Name the callers whose connections are taken, or the master whose own are."""
        one, master = next(iter(dials.values())), run.master
        callers = _redirecting(run, dials, reached)
        into = rules_of(run, master)
        said = f" ({one.banner!r})" if one.banner else ""
        nodes: tuple[str, ...] = callers
        if callers:
            verb = "calls" if len(callers) == 1 else "call"
            title = f"{listed(callers)} {verb} {master}'s port {one.port}"
            title += f", and another program answers{said}"
        elif len(dials) > 1 or (into is not None and into.redirects_in):
            nodes = (master,)
            title = f"another program answers all calls to {master}'s port {one.port}{said}"
        else:
            title = f"{arrows([(node, master) for node in dials])}: another program answers"
            title += f" on port {one.port}{said}"
        fix: list[Fix] = []
        for node in callers or (() if nodes else tuple(dials)):
            fix += firewall.exempt(run, node, (master,), str(one.port), "out")
        if not callers:
            fix += firewall.exempt(run, master, tuple(dials), str(one.port), "in")
        return self._finding(run, dials, title, nodes, fix)

    def _finding(
        self, run: Run, dials: Mapping[str, Dial], title: str, nodes: tuple[str, ...],
        fix: Collection[Fix],
    ) -> CheckFinding:  # fmt: skip
        one = next(iter(dials.values()))
        return self.fail(
            title,
            nodes=nodes,
            edges=((node, run.master) for node in dials),
            evidence={
                "class": one.outcome,
                "address": one.address,
                "port": one.port,
                "answered_by": one.answered_by if one.outcome == "wrong-host" else "",
                "banner": one.banner,
            },
            lines=shortened([f"seen from {listed(list(dials))}"]),
            fix=(*fix, Fix(command=f"export MASTER_PORT={_other(run, one.port)}")),
            unless="a proxy in between answers before it has reached the node",
        )


def _listens(run: Run, port: int) -> bool:
    """Return whether the master's own agent holds the port: then no program there can."""
    holder = run.reports.get(run.master)
    return holder is not None and holder.listening.master == port


def _redirecting(run: Run, dials: Mapping[str, Dial], reached: Collection[str]) -> tuple[str, ...]:
    """Return the callers whose own outgoing connections are taken, as far as that is known."""
    found = []
    for node, dial in dials.items():
        rules = rules_of(run, node)
        edges = [edge for peer, edge in run.reports[node].edges.items() if peer != run.master]
        meshes = [edge.mesh for edge in edges if edge.mesh is not None]
        elsewhere = [one for one in meshes if one.port == dial.port and one.outcome in STRANGERS]
        if reached or elsewhere or (rules is not None and rules.redirects_out):
            found.append(node)
    return ordered(run, found)


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
