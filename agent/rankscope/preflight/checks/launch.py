"""Presence and the launch environment: all nodes are there, and mean the same job."""

from __future__ import annotations

import re
import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

import msgspec

from rankscope.preflight.checks import meeting
from rankscope.preflight.checks.base import BuiltinCheck, Run, grouped, listed, on_each
from rankscope.preflight.checks.comparing import by_value, compared, odd_ones
from rankscope.preflight.checks.meeting import is_address, is_local
from rankscope.preflight.checks.pairs import CLOSED, SEEN, ordered, owners, shortened
from rankscope.preflight.checks.ranks import blocks, fault_of
from rankscope.preflight.checks.secret import refusing
from rankscope.preflight.exchange.hostlist import why_no_host
from rankscope.preflight.facts.edges import Dial, DialClass
from rankscope.preflight.facts.launch import LaunchFacts, Mode
from rankscope.preflight.model import CheckFinding, Claim, Fix, Stage, Status


class NodeAbsent(BuiltinCheck, id="node.absent", scope="all"):
    """Every expected node has reported, over one of the transports, and stays to the end."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Put absent nodes that their peers see alike into one finding."""
        yield from self._gone(run)
        if not run.absent:
            return
        refused = refusing(run)  # `node.secret` names them
        seen: dict[str, dict[str, Dial]] = {n: {} for n in run.absent if n not in refused}
        for start, end, edge in run.edges():
            dial = edge.mesh or edge.master
            if end in seen and dial is not None:
                seen[end][start] = dial
        alike = grouped((frozenset(d.outcome for d in seen[name].values()), name) for name in seen)
        for outcomes, nodes in alike.items():
            yield self._finding(run, nodes, outcomes, seen)

    def _gone(self, run: Run) -> Iterator[CheckFinding]:
        """Yield one for each way in which agents that had reported went away."""
        alike = grouped((gone.how, node) for node, gone in run.gone.items())
        for how, nodes in alike.items():
            says = [
                (r.node, node, r.gone[node])
                for r in run.present
                for node in r.gone
                if node in nodes
            ]
            yield self.fail(
                f"the preflight there {_AWAY[how]}, {_DURING[run.gone[nodes[0]].stage]}",
                at=nodes,
                edges=((start, node) for start, node, _ in says),
                evidence={node: {"how": how, "stage": run.gone[node].stage} for node in nodes},
                lines=shortened(
                    f"{start}: {node} {_GONE[gone.how]}, {gone.after_s:.0f} s after {start} began"
                    for start, node, gone in says
                ),
                fix=on_each(nodes[:4], _LOOK[how]),
                unless="the agent alone was stopped or killed there, and the machine is well",
                confidence="proven" if how == "left" else "likely",
            )

    def _finding(
        self,
        run: Run,
        nodes: list[str],
        outcomes: frozenset[DialClass],
        seen: dict[str, dict[str, Dial]],
    ) -> CheckFinding:
        lines = [
            f"from {start}: {_seen(dial)}" for name in nodes for start, dial in seen[name].items()
        ]
        if not lines:
            lines = [f"no node that reported has tried to reach {listed(nodes)}"]
        elif len(run.present) == 1 and len(run.expected) > 2:
            lines.append(f"{run.present[0].node} hears no other node: it may itself be cut off")
        command = f"rankscope preflight --nodes {shlex.quote(','.join(run.expected))}"
        if len(run.expected) > 16:
            command = "rankscope preflight  # with the same options as here"
        if run.master_port != 29500:
            command += f" --master-port {run.master_port}"
        fixes = [Fix(node=name, command=command) for name in nodes[:4]]
        if outcomes == {"no-data"}:  # its kernel accepts, and no process answers
            fixes = [*on_each(nodes[:4], _LOOK["silent"])]
        if outcomes & {"ok", "no-data"}:
            fixes.append(Fix(command=_LARGE_LOST, owner="admin"))
        if "drop" in outcomes or "prohibited" in outcomes or "refused" in outcomes:
            text = (
                f"# if it runs there: let the nodes reach each other at tcp {run.master_port} and "
            )
            text += "the random ports; to see more until then: rankscope preflight --share DIR, a "
            fixes.append(Fix(command=text + "directory that all nodes have"))
        return self.fail(
            "no report",
            at=nodes,
            edges=((start, name) for name in nodes for start in seen[name]),
            evidence={
                "classes": sorted(outcomes),
                "num_reported": len(run.present),
                "num_expected": len(run.expected),
            },
            lines=shortened(lines),
            fix=fixes,
            unless=f"the agent runs on {listed(nodes)}: then it cannot reach those who reported",
            confidence="likely",
        )


_LARGE_LOST = (
    "# where its port answers and no report comes, large packets may vanish on the way: "
    "ping -M do -s 1400 and -s 400 to that node; lower the MTU of both, or mend the path"
)
_AWAY = {  # what became of an agent that had reported
    "left": "was ended (Ctrl-C, or its --timeout)",
    "closed": "has died",
    "silent": "has stopped answering",
}
_GONE = {
    "left": "left", "closed": "closed its connections", "silent": "was silent for 6 s",
}  # fmt: skip
_LOOK = {
    "left": "rankscope preflight  # again, on all nodes, with the same options as here",
    "closed": "journalctl -k --since -10min  # killed for memory? rebooted? else start it again",
    "silent": "ps -o pid,stat,wchan:20,args -C rankscope  # T: stopped; D: waits for a disk",
}
_DURING: dict[Stage, str] = {
    "facts": "before it listened",
    "listening": "while ports were dialled",
    "reached": "while paths were timed",
    "pairs": "while bandwidth was measured",
    "transferred": "while bandwidth was measured",
    "bandwidth": "while bandwidth was measured",
    "again": "in the collective test",
    "collective": "at its end",
    "done": "at its end",
}


class NodeTwice(BuiltinCheck, id="node.twice", scope="all"):
    """No two agents go by the name of one node: each machine is named once."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail where two machines have one name; warn where one machine runs two agents."""
        agents: dict[str, set[Claim]] = defaultdict(set)
        for report in run.present:
            for node, claims in report.claims.items():
                agents[node].update(claims)
        for node, some in agents.items():
            yield self._finding(run, node, sorted(some, key=lambda claim: claim.started_unix_s))

    def _finding(self, run: Run, node: str, claims: list[Claim]) -> CheckFinding:
        are_apart = len({claim.addresses for claim in claims}) > 1
        text = (
            "# leave one agent on each machine: end the other where it was started, or let it end"
        )
        fix = [Fix(node=node, command=text)]
        impact = "if the job is started like this, two launchers want the same ports and GPUs"
        if are_apart:
            fix = [
                Fix(command=f"rankscope preflight --node NAME   # on {claim.addresses[0]}")
                for claim in claims[1:]
                if claim.addresses and is_address(claim.addresses[0])
            ]
            impact = _DOUBLE_RANK[run.mode]
        return self.finding(
            "fail" if are_apart else "warn",
            f"{len(claims)} agents go by this name, {'not ' if are_apart else ''}on one machine",
            at=(node,),
            evidence={"agents": [msgspec.to_builtins(claim) for claim in claims]},
            lines=(f"{node} is {_agent(claim)}" for claim in claims),
            fix=fix,
            impact=impact,
            unless="the first of the agents was killed, and the other started in its place",
            confidence="proven" if are_apart else "likely",
        )


def _agent(claim: Claim) -> str:
    since = time.strftime("%H:%M:%S UTC", time.gmtime(claim.started_unix_s))
    return f"pid {claim.pid} at {', '.join(claim.addresses[:3]) or 'no address'}, since {since}"


def _seen(dial: Dial) -> str:
    return SEEN[dial.outcome].format(
        address=dial.address, port=dial.port, elapsed_s=dial.elapsed_ms / 1e3,
        answered_by=dial.answered_by, errno=dial.errno, banner=dial.banner,
    )  # fmt: skip


class EnvComplete(BuiltinCheck, id="env.complete"):
    """Ranks, sizes and the endpoint are set, are integers, and fit together.

    torch reads MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE; what is missing ends the rank at
    once, what does not fit (RANK >= WORLD_SIZE) leaves the others waiting.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail on values that are missing, unreadable, or out of their range."""
        yield from self.not_measured(run, "launch")
        by_hand = [n for n, x in run.launches.items() if x.launcher == "hand" and not x.errors]
        yield from self.note("skipped", by_hand, "no launcher has set anything to check")
        launched = {n: launch for n, launch in run.launches.items() if n not in by_hand}
        causes = grouped((c, node) for node, launch in launched.items() for c in _faults(launch))
        for cause, nodes in causes.items():
            yield self.fail(
                cause,
                at=nodes,
                evidence={
                    "cause": cause,
                    "launcher": run.launches[nodes[0]].launcher,
                    **({"variable": "MASTER_ADDR"} if _is_about_host(cause) else {}),
                },
                lines=(_launch_line(run, node) for node in nodes[:4]),
                fix=_complete_fixes(run, nodes, cause),
                impact="that rank ends with an error at init_process_group, or never starts; "
                "the others wait 10 to 30 min for it",
                unless="the script sets the value itself before it calls init_process_group",
            )


def _faults(launch: LaunchFacts) -> Iterator[str]:
    """Yield what is wrong, in words that are the same on all nodes with the same cause."""
    yield from launch.errors
    if launch.launcher == "hand":
        return
    unreadable = {error.partition("=")[0] for error in launch.errors}
    if launch.launcher == "env":
        needed = {"MASTER_ADDR": launch.master_addr, "RANK": launch.rank,
                  "WORLD_SIZE": launch.world_size}  # fmt: skip
        missing = [n for n, value in needed.items() if value in ("", None) and n not in unreadable]
        if missing:
            yield f"{', '.join(missing)} not set"
    if launch.master_addr and (why := why_no_host(launch.master_addr)):
        yield f"MASTER_ADDR {launch.master_addr[:60]!r} is no host name: {why}"
    if not 0 < launch.master_port < 65536:
        yield f"MASTER_PORT={launch.master_port} is no port"
    yield from _out_of_range(launch)


def _out_of_range(launch: LaunchFacts) -> Iterator[str]:
    pairs = (
        ("RANK", launch.rank, "WORLD_SIZE", launch.world_size),
        ("LOCAL_RANK", launch.local_rank, "LOCAL_WORLD_SIZE", launch.nproc_per_node),
    )
    for name, value, size_name, size in pairs:
        if value is not None and value < 0:
            yield f"{name}={value} is negative"
        elif value is not None and size is not None and value >= size:
            yield f"{name}={value}, but {size_name}={size}: ranks are counted from 0"
    sizes = (("WORLD_SIZE", launch.world_size), ("nodes", launch.num_nodes),
             ("processes per node", launch.nproc_per_node))  # fmt: skip
    for name, value in sizes:
        if value is not None and value < 1:
            yield f"{name}={value}: at least 1 is needed"
    if launch.min_nodes is not None and launch.num_nodes is not None:
        if launch.min_nodes > launch.num_nodes:
            yield f"--nnodes={launch.min_nodes}:{launch.num_nodes}: the smaller number comes first"


def _launch_line(run: Run, node: str) -> str:
    launch = run.launches[node]
    return (
        f"{node} ({launch.launcher}): MASTER_ADDR={launch.master_addr or '(not set)'} "
        f"RANK={_or_unset(launch.rank)} WORLD_SIZE={_or_unset(launch.world_size)} "
        f"LOCAL_RANK={_or_unset(launch.local_rank)}"
    )


def _or_unset(value: int | None) -> str:
    return "(not set)" if value is None else str(value)


def _complete_fixes(run: Run, nodes: list[str], cause: str) -> Iterator[Fix]:
    """Yield export lines with the values that the other nodes and the order of nodes give."""
    is_by_variables = run.launches[nodes[0]].launcher in ("env", "kubernetes", "mpi")
    sizes = [launch.world_size for launch in run.launches.values() if launch.world_size]
    for node in nodes:
        nproc = run.nproc(node)
        world = max(set(sizes), key=sizes.count) if sizes else nproc * len(run.expected)
        position = run.expected.index(node) if node in run.expected else 0
        values = {
            "MASTER_ADDR": _meant_host(run, node),
            "MASTER_PORT": str(run.master_port if 0 < run.master_port < 65536 else 29500),
            "WORLD_SIZE": str(world),
            "RANK": str(position * nproc),
        }
        wanted = [f"{name}={value}" for name, value in values.items() if name in cause]
        if wanted and is_by_variables:
            yield Fix(node=node, command=f"export {shlex.join(wanted)}")
        elif option := _endpoint_option(run.launches[node], cause):
            command = _option_with(option, values["MASTER_ADDR"], values["MASTER_PORT"])
            yield Fix(node=node, command=command)


# Where a launch may say where its nodes meet.
_ENDPOINT_OPTIONS = ("--rdzv-endpoint", "PET_RDZV_ENDPOINT")
_HOST_OPTIONS = (*_ENDPOINT_OPTIONS, "--master-addr", "PET_MASTER_ADDR", "MASTER_ADDR")
_PORT_OPTIONS = (*_ENDPOINT_OPTIONS, "--master-port", "PET_MASTER_PORT", "MASTER_PORT")
_HOST_IN = re.compile(r"(?:[a-z]+://)?\[?(.*?)\]?(?::[0-9]+)?/*")  # http://node0:29500, [fd00::1]


def _meant_host(run: Run, node: str) -> str:
    """Return the host that a node's MASTER_ADDR means: its own, another node's, else rank 0's."""
    own = run.launches[node].master_addr
    meant = _HOST_IN.fullmatch(own)
    given = [
        own,
        meant[1] if meant is not None else "",
        *(x.master_addr for x in run.launches.values()),
    ]
    return next((host for host in given if host and not why_no_host(host)), run.master)


def _endpoint_option(launch: LaunchFacts, cause: str) -> str:
    """Return the variable or option that says the host or port that a cause is about; or ""."""
    is_port = "MASTER_PORT" in cause or any(cause.startswith(f"{one}=") for one in _PORT_OPTIONS)
    options = _HOST_OPTIONS if _is_about_host(cause) else _PORT_OPTIONS if is_port else ()
    if cause in launch.errors:
        return next((x for x in options if cause.startswith(f"{x}=")), "")
    return next((x for x in options if x in launch.read_from), "")


def _is_about_host(cause: str) -> bool:
    return "has a blank in it" in cause or "is no host name" in cause


def _option_with(option: str, host: str, port: str) -> str:
    """Return what a person writes to meet there."""
    value = port if option in _PORT_OPTIONS else host
    if option in _ENDPOINT_OPTIONS:
        value = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    value = shlex.quote(value)
    return (
        f"torchrun {option} {value} ..." if option.startswith("--") else f"export {option}={value}"
    )


_FIELDS: tuple[tuple[str, str, Callable[[LaunchFacts], object]], ...] = (
    # what it is called, the option that sets it, the value
    ("number of nodes", "--nnodes", lambda launch: _nodes(launch)),
    ("world size", "WORLD_SIZE", lambda launch: launch.world_size),
    ("rendezvous id", "--rdzv-id", lambda launch: launch.rendezvous_id or "none"),
    ("rendezvous", "--rdzv-backend", lambda launch: launch.mode),
)
_Field = tuple[str, str, dict[str, object]]  # its name, its option, its value on each node
_NO_MEETING: dict[Mode, str] = {
    "static": "torchrun waits 5 to 15 min, or trains with another number of nodes than you meant; "
    "with nnodes 3, 3, 2 it ends only after the 300 s exit barrier",
    "c10d": "RendezvousTimeoutError on all nodes after 10 min",
    "env": "init_process_group waits 30 min for ranks that never come",
}


class EnvAgree(BuiltinCheck, id="env.agree", scope="all", needs=("peers",)):
    """Endpoint, port, nodes, world size and rendezvous are the same on all nodes."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail where nodes would not meet; warn where they only differ."""
        launches = {n: launch for n, launch in run.launches.items() if launch.launcher != "hand"}
        fields: list[_Field] = [
            (what, option, {n: v for n, x in launches.items() if (v := read(x)) is not None})
            for what, option, read in _FIELDS
        ]
        fields.insert(0, ("port of the endpoint", "--master-port", _ports(run, launches)))
        by_nodes: dict[tuple[str, ...], list[_Field]] = defaultdict(list)
        for field in fields:
            if odd := odd_ones(field[2]):
                by_nodes[odd].append(field)
        endpoints = _endpoints(run)
        if odd := _elsewhere(run, endpoints):
            by_nodes[odd].append((_ENDPOINT, _SETS[run.mode], endpoints))
        for nodes, differing in by_nodes.items():
            yield self._finding(run, nodes, differing, "fail")
        nproc: dict[str, object] = {
            n: x.nproc_per_node for n, x in launches.items() if x.nproc_per_node
        }
        if odd := odd_ones(nproc):
            field = ("processes per node", "--nproc-per-node", nproc)
            yield self._finding(run, odd, [field], "warn")
        yield from self._unreached(run, endpoints)
        yield from self._asked(run)

    def _unreached(self, run: Run, endpoints: dict[str, object]) -> Iterator[CheckFinding]:
        """Warn where a node was given another address of the same node, which does not answer."""
        names = {node: meeting.said_by(run, node) for node in endpoints}
        ends = {node: meeting.dial_of(run, node) for node in endpoints}
        good = [names[n] for n, dial in ends.items() if dial is not None and dial.outcome == "ok"]
        if len(set(endpoints.values())) != 1 or not good:
            return
        usual = max(good, key=good.count)
        lost = [
            node
            for node, dial in ends.items()
            if dial is not None and dial.outcome in CLOSED and names[node] != usual
        ]
        if lost:
            yield self.warn(
                f"MASTER_ADDR is {names[lost[0]]}, another address of {run.master} than elsewhere "
                f"({usual}), and it does not answer",
                at=lost,
                evidence={"endpoints": names},
                lines=compared(names),
                fix=(meeting.point_to(run, usual, node) for node in lost),
                impact=_NO_MEETING[run.mode],
            )

    def _finding(
        self, run: Run, nodes: tuple[str, ...], fields: list[_Field], status: Status
    ) -> CheckFinding:
        names = ", ".join(what for what, _, _ in fields)
        verb = "differ" if len(fields) > 1 else "differs"
        what, _, values = fields[0]
        nodes = ordered(run, nodes)
        usual = _most(values, nodes)
        is_tie = usual is None
        how = "no majority" if is_tie else f"{values[nodes[0]]}, the others {usual}"
        return self.finding(
            status,
            f"{names} {verb} ({what}{':' if is_tie else ''} {how})",
            at=nodes,
            evidence={what: dict(values) for what, _, values in fields},
            lines=(f"{w}: {line}" for w, _, v in fields for line in compared(v)),
            fix=() if is_tie else _agree_fixes(run, fields, nodes),
            impact=_NO_MEETING[run.mode] if status == "fail" else "ranks are spread unevenly",
            unless="" if status == "fail" else "the nodes have different numbers of GPUs",
        )

    def _asked(self, run: Run) -> Iterator[CheckFinding]:
        """Warn where preflight itself was asked different questions."""
        if odd := odd_ones({report.node: repr(report.options) for report in run.present}):
            yield self.warn(
                "preflight was started with other options than elsewhere",
                at=odd,
                evidence={r.node: repr(r.options) for r in run.present},
                impact="the job is not changed by it; the checks may answer another question",
            )


def _nodes(launch: LaunchFacts) -> str | None:
    if launch.num_nodes is None:
        return None
    return f"{launch.min_nodes}:{launch.num_nodes}" if launch.min_nodes else str(launch.num_nodes)


def _ports(run: Run, launches: dict[str, LaunchFacts]) -> dict[str, object]:
    """Return each node's MASTER_PORT, by whatever it was said."""
    ports: dict[str, object] = {node: launch.master_port for node, launch in launches.items()}
    asked = {r.node: r.endpoint.port for r in run.present if r.endpoint is not None}
    return ports | {node: port for node, port in asked.items() if port}


_ENDPOINT = "endpoint"
_SETS: dict[Mode, str] = {
    "static": "--master-addr", "c10d": "--rdzv-endpoint", "env": "MASTER_ADDR",
}  # fmt: skip


def _endpoints(run: Run) -> dict[str, object]:
    """Return each node's endpoint; what means the same node or address counts as the same.

    What one name means may differ from node to node: that is dns.wrong's or dns.loopback's.
    """
    owned = owners(run)
    groups: list[tuple[str, set[str]]] = []
    found: dict[str, object] = {}
    for node in (report.node for report in run.present):
        name = meeting.said_by(run, node)
        if not name or is_local(name):  # that is env.endpoint.local's
            continue
        lead = "" if meeting.is_loop(run, node) else meeting.leads_to(run, node, owned)
        meaning = {name, *meeting.addresses_of(run, node), *([f"node {lead}"] if lead else [])}
        label, members = next((one for one in groups if one[1] & meaning), (name, meaning))
        if members is meaning:
            groups.append((name, meaning))
        members |= meaning
        found[node] = label
    return found


def _elsewhere(run: Run, endpoints: dict[str, object]) -> tuple[str, ...]:
    """Return the nodes with another endpoint than leads to rank 0, else than most say."""
    owned = owners(run)
    right = {endpoints[n] for n in endpoints if meeting.leads_to(run, n, owned) == run.master}
    if len(set(endpoints.values())) > 1 and len(right) == 1:
        return tuple(node for node, label in endpoints.items() if label not in right)
    return odd_ones(endpoints)


def _most(values: dict[str, object], odd: tuple[str, ...]) -> object | None:
    """Return the value of the nodes that are not odd; None in a tie."""
    rest = [value for node, value in values.items() if node not in odd]
    return rest[0] if rest else None


def _agree_fixes(run: Run, fields: list[_Field], odd: tuple[str, ...]) -> Iterator[Fix]:
    """Yield what makes the odd nodes say what the others say."""
    wanted = {option: str(_most(values, odd)) for _, option, values in fields}
    if run.mode == "env":
        names = {"--master-port": "MASTER_PORT", "--nnodes": "NNODES"}
        wanted = {names.get(option, option): value for option, value in wanted.items()}
    elif run.mode == "c10d":
        wanted = _joined(run, wanted)
    options = [f"{one} {shlex.quote(v)}" for one, v in wanted.items() if one.startswith("--")]
    exports = [f"{one}={shlex.quote(v)}" for one, v in wanted.items() if not one.startswith("--")]
    for node in odd:
        if options:
            yield Fix(node=node, command=f"torchrun {' '.join(options)} ...")
        else:
            yield Fix(node=node, command=f"export {' '.join(exports)}")


def _joined(run: Run, wanted: dict[str, str]) -> dict[str, str]:
    """Return the options as c10d takes them: host and port are one."""
    port = wanted.pop("--master-port", "")
    host = wanted.pop("--rdzv-endpoint", "")
    if port or host:
        host = host or next(iter(meeting.said_by(run, n) for n in (run.master,)), "")
        host = f"[{host}]" if ":" in host else host
        wanted["--rdzv-endpoint"] = f"{host}:{port or run.master_port}"
    return wanted


_DOUBLE_RANK: dict[Mode, str] = {
    "static": "the store waits 15 min for the number that no node has: "
    "'keys: .../assigned_ranks/N', then all nodes end",
    "c10d": "nothing: this rendezvous numbers the nodes itself",
    "env": "init_process_group waits 30 min for the rank that no node has",
}


class EnvRankUnique(BuiltinCheck, id="env.rank.unique", scope="all", needs=("peers",)):
    """Nodes and ranks are numbered from 0 without doubles and gaps."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail on a number that two nodes have, or that is beyond the number of nodes."""
        if run.mode == "c10d":
            yield self.skipped("a c10d rendezvous numbers the nodes itself")
            return
        # a number of the node may follow from RANK: then RANK is the cause
        own = {n: x.rank for n, x in run.launches.items() if x.rank is not None}
        ranks = {n: x.node_rank for n, x in run.launches.items() if x.node_rank is not None}
        kind, doubled = "RANK", _doubles(own)
        if not doubled:
            kind, doubled = "node rank", _doubles(ranks)
        for number, nodes in doubled.items():
            yield self._doubled(run, kind, number, nodes)
        sizes = [x.num_nodes for x in run.launches.values() if x.num_nodes is not None]
        limit = max(sizes, default=len(run.expected))  # where they differ: that is env.agree's
        high = {node: number for node, number in ranks.items() if not 0 <= number < limit}
        if high and not doubled:
            yield self._beyond(run, ranks, high, limit)
        if not high and not doubled and not run.absent:
            yield from self._blocks(run)

    def _blocks(self, run: Run) -> Iterator[CheckFinding]:
        """Fail where a node begins within another's ranks, or numbers are left that no node has."""
        found = blocks(run)
        worlds = {x.world_size for n, x in run.launches.items() if n in found and x.world_size}
        if len(found) < len(run.present) or len(worlds) != 1:
            return
        (world,) = worlds
        fault = fault_of(run, found, world)
        if fault is not None:
            yield self.fail(
                fault.title,
                nodes=fault.nodes,
                evidence={
                    "world_size": world,
                    "first_ranks": {node: block.first for node, block in found.items()},
                    "sizes": {node: block.size for node, block in found.items()},
                },
                lines=(
                    f"{node}: RANK {block.first}, "
                    f"LOCAL_WORLD_SIZE {block.size if block.size else '(not set)'}"
                    for node, block in list(found.items())[:6]
                ),
                fix=(Fix(node=node, command=command) for node, command in fault.commands),
                impact=_DOUBLE_RANK["env"],
                unless=fault.unless,
                confidence=fault.confidence,
            )

    def _doubled(self, run: Run, kind: str, number: int, nodes: tuple[str, ...]) -> CheckFinding:
        has_same_default = (
            kind == "node rank"
            and run.mode == "static"
            and all(
                not {"--node-rank", "PET_NODE_RANK", "GROUP_RANK", "NODE_RANK"}
                & set(run.launches[node].read_from)
                for node in nodes
            )
        )
        why = " (torchrun takes 0 where --node-rank is not given)" if has_same_default else ""
        return self.fail(
            f"{listed(nodes)} all say {kind} {number}{why}"
            if len(nodes) > 2
            else f"{nodes[0]} and {nodes[1]} both say {kind} {number}{why}",
            nodes=nodes,
            evidence={kind.replace(" ", "_").lower(): number, "nodes": list(nodes)},
            lines=(f"{node}: {kind} {number}" for node in nodes[:4]),
            fix=_numbered(run, kind, nodes),
            impact=_DOUBLE_RANK[run.mode],
        )

    def _beyond(
        self, run: Run, ranks: dict[str, int], high: dict[str, int], limit: int
    ) -> CheckFinding:
        said = ", ".join(f"{node} says {n} of {limit}" for node, n in list(high.items())[:4])
        return self.fail(
            f"node ranks are counted from 0: {said}",
            nodes=high,
            evidence={"node_ranks": high},
            fix=_numbered(run, "node rank", tuple(ranks if 0 not in ranks.values() else high)),
            impact=_DOUBLE_RANK[run.mode],
        )


def _doubles(numbers: dict[str, int]) -> dict[int, tuple[str, ...]]:
    return {number: nodes for number, nodes in by_value(numbers).items() if len(nodes) > 1}


def _numbered(run: Run, kind: str, nodes: tuple[str, ...]) -> Iterator[Fix]:
    """Yield one command for each node, with numbers that no other node has.

    Rank 0 goes where MASTER_ADDR leads, the others to their places in the list where these are
    free.
    """
    worlds = {launch.world_size for launch in run.launches.values()}
    is_by_node = kind != "RANK" or worlds == {len(run.expected)}
    unit = {name: 1 if is_by_node else run.nproc(name) for name in run.expected}
    starts = [sum(list(unit.values())[:place]) for place in range(len(unit))]
    numbers = dict(zip(run.expected, starts, strict=True))
    taken = {
        launch.rank if kind == "RANK" else launch.node_rank
        for name, launch in run.launches.items()
        if name not in nodes
    }
    free = [number for number in starts if number not in taken]
    owned = owners(run)
    leads = [meeting.leads_to(run, name, owned) for name in run.reports]
    chosen: dict[str, int] = {}
    for name in sorted(nodes, key=lambda one: (-leads.count(one), numbers.get(one, 0))):
        if name not in numbers or not free:
            continue
        wants = 0 if 0 in free and name in leads else numbers[name]
        chosen[name] = wants if wants in free else free[0]
        free.remove(chosen[name])
    for name in nodes:
        if name in chosen and kind == "RANK":
            yield Fix(node=name, command=f"export RANK={chosen[name]}")
        elif name in chosen:
            yield Fix(node=name, command=f"torchrun --node-rank {chosen[name]} ...")


_LOCAL_ENDPOINT: dict[Mode, str] = {
    "static": "every node but the first waits for a store on itself: time-out after 14 min, "
    "the last process ends after 30",
    "c10d": "each node is its own store: RendezvousTimeoutError on all after 10 min",
    "env": "every node but the first waits 30 min for a store on itself",
}


class EnvEndpointLocal(BuiltinCheck, id="env.endpoint.local", needs=("peers",)):
    """The endpoint is an address of node 0 that the others can reach, not localhost."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail on a loopback endpoint, except at node 0, which may call itself localhost."""
        owned = owners(run)
        local = [node for node in run.launches if self._is_itself(run, node, owned)]
        culprits = [node for node in local if node != run.master]
        if not culprits:
            return
        nodes = local if len(local) == len(run.launches) else culprits
        said = meeting.said_by(run, culprits[0])
        yield self.fail(
            f"the endpoint is {said}, which is each node itself",
            at=nodes,
            evidence={node: meeting.said_by(run, node) for node in nodes},
            lines=(f"{len(run.expected)} nodes are expected to meet there",),
            fix=(meeting.point_to(run, meeting.way_to(run, run.master)),),
            impact=_LOCAL_ENDPOINT[run.mode],
            unless="the script replaces MASTER_ADDR before it meets the others",
        )

    @staticmethod
    def _is_itself(run: Run, node: str, owned: Mapping[str, frozenset[str]]) -> bool:
        """Return whether the endpoint is loopback, or an address that several nodes have."""
        if is_local(meeting.said_by(run, node)):
            return True
        dial = meeting.dial_of(run, node)
        is_own = dial is not None and dial.answered_by == node
        return dial is not None and is_own and len(owned.get(dial.address, ())) > 1
