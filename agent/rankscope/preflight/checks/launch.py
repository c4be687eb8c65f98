"""Presence and the launch environment: all nodes are there, and mean the same job."""

from __future__ import annotations

import difflib
import functools
import ipaddress
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from rankscope.preflight.checks.base import BuiltinCheck, Run, grouped, listed, on_each
from rankscope.preflight.checks.commands import quoted
from rankscope.preflight.checks.comparing import by_value, compared, odd_ones
from rankscope.preflight.checks.pairs import SEEN, shortened
from rankscope.preflight.checks.secret import refusing
from rankscope.preflight.facts.edges import Dial, DialClass
from rankscope.preflight.facts.launch import LaunchFacts, Mode
from rankscope.preflight.model import CheckFinding, Claim, Fix, NodeReport, Stage, Status


class NodeAbsent(BuiltinCheck, id="node.absent", scope="all"):
    """Every expected node has reported, over one of the transports."""

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
        command = f"rankscope preflight --nodes {','.join(run.expected)}"
        if len(run.expected) > 16:
            command = "rankscope preflight  # with the same options as here"
        if run.master_port != 29500:
            command += f" --master-port {run.master_port}"
        fixes = [Fix(node=name, command=command) for name in nodes[:4]]
        if outcomes == {"no-data"}:  # its kernel accepts, and no process answers
            fixes = [*on_each(nodes[:4], _LOOK["silent"])]
        if "drop" in outcomes or "prohibited" in outcomes or "refused" in outcomes:
            text = "rankscope preflight --share DIR  # if it runs there: another way to report"
            fixes.append(Fix(command=text))
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


_AWAY = {  # what became of an agent that had reported
    "left": "was ended (Ctrl-C, or its --timeout)",
    "closed": "has died",
    "silent": "has stopped answering",
}
_GONE = {"closed": "closed its connections", "silent": "was silent for 6 s"}
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
                if claim.addresses
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
        by_hand = [n for n, launch in run.launches.items() if launch.launcher == "hand"]
        yield from self.note("skipped", by_hand, "no launcher has set anything to check")
        launched = {n: launch for n, launch in run.launches.items() if n not in by_hand}
        causes = grouped((c, node) for node, launch in launched.items() for c in _faults(launch))
        for cause, nodes in causes.items():
            yield self.fail(
                cause,
                at=nodes,
                evidence={"cause": cause, "launcher": run.launches[nodes[0]].launcher},
                lines=(_launch_line(run, node) for node in nodes[:4]),
                fix=_complete_fixes(run, nodes, cause),
                impact="that rank ends with an error at init_process_group, or never starts; "
                "the others wait 10 to 30 min for it",
                unless="the script sets the value itself before it calls init_process_group",
            )


def _faults(launch: LaunchFacts) -> Iterator[str]:
    """Yield what is wrong, in words that are the same on all nodes with the same cause."""
    yield from launch.errors
    unreadable = {error.partition("=")[0] for error in launch.errors}
    if launch.launcher == "env":
        needed = {"MASTER_ADDR": launch.master_addr, "RANK": launch.rank,
                  "WORLD_SIZE": launch.world_size}  # fmt: skip
        missing = [n for n, value in needed.items() if value in ("", None) and n not in unreadable]
        if missing:
            yield f"{', '.join(missing)} not set"
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
    if run.launches[nodes[0]].launcher not in ("env", "kubernetes", "mpi"):
        return
    addresses = [launch.master_addr for launch in run.launches.values() if launch.master_addr]
    sizes = [launch.world_size for launch in run.launches.values() if launch.world_size]
    for node in nodes:
        nproc = run.nproc(node)
        world = max(set(sizes), key=sizes.count) if sizes else nproc * len(run.expected)
        position = run.expected.index(node) if node in run.expected else 0
        values = {
            "MASTER_ADDR": addresses[0] if addresses else run.master,
            "MASTER_PORT": str(run.master_port if 0 < run.master_port < 65536 else 29500),
            "WORLD_SIZE": str(world),
            "RANK": str(position * nproc),
        }
        wanted = [f"{name}={value}" for name, value in values.items() if name in cause]
        if wanted:
            yield Fix(node=node, command=f"export {' '.join(wanted)}")


_FIELDS: tuple[tuple[str, str, Callable[[LaunchFacts], object]], ...] = (
    # what it is called, the option that sets it, the value
    ("port of the endpoint", "--master-port", lambda launch: launch.master_port),
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
        fields.append(("endpoint", "--master-addr", dict(_endpoints(run, launches))))
        by_nodes: dict[tuple[str, ...], list[_Field]] = defaultdict(list)
        for field in fields:
            if odd := odd_ones(field[2]):
                by_nodes[odd].append(field)
        for nodes, differing in by_nodes.items():
            yield self._finding(run, nodes, differing, "fail")
        nproc: dict[str, object] = {
            n: x.nproc_per_node for n, x in launches.items() if x.nproc_per_node
        }
        if odd := odd_ones(nproc):
            field = ("processes per node", "--nproc-per-node", nproc)
            yield self._finding(run, odd, [field], "warn")
        yield from self._asked(run)

    def _finding(
        self, run: Run, nodes: tuple[str, ...], fields: list[_Field], status: Status
    ) -> CheckFinding:
        names = ", ".join(what for what, _, _ in fields)
        what, _, values = fields[0]
        usual = _most(values, nodes)
        is_tie = usual is None
        how = "no majority" if is_tie else f"{values[nodes[0]]}, the others {usual}"
        return self.finding(
            status,
            f"{names} differ ({what}{':' if is_tie else ''} {how})",
            at=nodes,
            evidence={what: dict(values) for what, _, values in fields},
            lines=(f"{w}: {line}" for w, _, v in fields for line in compared(v)),
            fix=() if is_tie else _agree_fixes(fields, nodes),
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


def _endpoints(run: Run, launches: dict[str, LaunchFacts]) -> Iterator[tuple[str, str]]:
    """Yield each node's endpoint; names that mean the same address count as the same."""
    groups: list[tuple[str, set[str]]] = []
    for node, launch in launches.items():
        name = launch.master_addr
        if not name or is_local(name):  # that is env.endpoint.local's
            continue
        facts = run.reports[node].facts.names
        resolved = facts.master.addresses if facts is not None and facts.master is not None else ()
        meaning = {name, *resolved}
        first = next((label for label, members in groups if members & meaning), "")
        if not first:
            groups.append((name, meaning))
        yield node, first or name


def _most(values: dict[str, object], odd: tuple[str, ...]) -> object | None:
    """Return the value of the nodes that are not odd; None in a tie."""
    rest = [value for node, value in values.items() if node not in odd]
    return rest[0] if rest else None


def _agree_fixes(fields: list[_Field], odd: tuple[str, ...]) -> Iterator[Fix]:
    """Yield what makes the odd nodes say what the others say."""
    wanted = [(option, _most(values, odd)) for _, option, values in fields]
    options = [f"{option} {value}" for option, value in wanted if option.startswith("--")]
    exports = [f"{option}={value}" for option, value in wanted if not option.startswith("--")]
    for node in odd:
        if options:
            yield Fix(node=node, command=f"torchrun {' '.join(options)} ...")
        else:
            yield Fix(node=node, command=f"export {' '.join(exports)}")


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
            yield self._beyond(run, high, limit)

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

    def _beyond(self, run: Run, high: dict[str, int], limit: int) -> CheckFinding:
        said = ", ".join(f"{node} says {n} of {limit}" for node, n in list(high.items())[:4])
        return self.fail(
            f"node ranks are counted from 0: {said}",
            nodes=high,
            evidence={"node_ranks": high},
            fix=_numbered(run, "node rank", tuple(high)),
            impact=_DOUBLE_RANK[run.mode],
        )


def _doubles(numbers: dict[str, int]) -> dict[int, tuple[str, ...]]:
    return {number: nodes for number, nodes in by_value(numbers).items() if len(nodes) > 1}


def _numbered(run: Run, kind: str, nodes: tuple[str, ...]) -> Iterator[Fix]:
    """Yield one command for each node, numbered in the order of the expected nodes."""
    for node in nodes:
        if node not in run.expected:
            continue
        position = run.expected.index(node)
        if kind == "RANK":
            yield Fix(node=node, command=f"export RANK={position * run.nproc(node)}")
        else:
            yield Fix(node=node, command=f"torchrun --node-rank {position} ...")


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
        local = [n for n, launch in run.launches.items() if is_local(launch.master_addr)]
        culprits = [node for node in local if node != run.master]
        if not culprits:
            return
        nodes = local if len(local) == len(run.launches) else culprits
        said = run.launches[culprits[0]].master_addr
        command = f"torchrun --master-addr {run.master} ..."
        if run.mode == "c10d":
            command = f"torchrun --rdzv-endpoint {run.master}:{run.master_port} ..."
        elif run.mode == "env":
            command = f"export MASTER_ADDR={run.master}"
        yield self.fail(
            f"the endpoint is {said}, which is each node itself",
            at=nodes,
            evidence={node: run.launches[node].master_addr for node in nodes},
            lines=(f"{len(run.expected)} nodes are expected to meet there",),
            fix=(Fix(command=command),),
            impact=_LOCAL_ENDPOINT[run.mode],
            unless="the script replaces MASTER_ADDR before it meets the others",
        )


def is_local(name: str) -> bool:
    """Return whether a host name or address always means the machine itself."""
    if name.lower().rstrip(".") in ("localhost", "localhost.localdomain", "ip6-localhost"):
        return True
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


UNSET = "(not set)"
# these choose a protocol that both ends must speak: where they differ, NCCL hangs or aborts
_MUST_AGREE = ("NCCL_NET", "NCCL_ALGO", "NCCL_PROTO", "NCCL_SOCKET_FAMILY", "NCCL_IB_DISABLE")
# differ between ranks or nodes by design; names of interfaces are for net.iface.*
_OWN = re.compile(
    r"CUDA_VISIBLE_DEVICES|HIP_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES|NCCL_HOSTID|NCCL_COMM_ID|"
    r"NCCL_IB_HCA|.*_SOCKET_IFNAME|.*_(FILE|DIR|PATH|CPUSET|PREFIX)|.*RANK.*"
)


class EnvDrift(BuiltinCheck, id="env.drift", scope="all", needs=("peers",)):
    """NCCL_*, GLOO_*, TORCH_*, CUDA_*, OMP_* and NCCL's files are the same on all nodes."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn on different values; fail on those that both ends must share."""
        launches = run.launches
        names = {name for launch in launches.values() for name in launch.environment}
        paths = {path for launch in launches.values() for path in launch.conf_files}
        rows = {
            name: {node: launch.environment.get(name, UNSET) for node, launch in launches.items()}
            for name in sorted(names)
            if not _OWN.fullmatch(name)
        }
        for path in sorted(paths):
            rows[path] = {n: launch.conf_files.get(path, UNSET) for n, launch in launches.items()}
        groups: dict[tuple[Status, tuple[str, ...]], list[str]] = defaultdict(list)
        for name, values in rows.items():
            if odd := odd_ones(values):
                must = name in _MUST_AGREE and run.backend == "nccl"
                groups["fail" if must else "warn", odd].append(name)
        for (status, nodes), drifted in groups.items():
            yield self._finding(status, nodes, {name: rows[name] for name in drifted})

    def _finding(
        self, status: Status, nodes: tuple[str, ...], rows: dict[str, dict[str, str]]
    ) -> CheckFinding:
        name, values = next(iter(rows.items()))
        more = f" and {len(rows) - 1} more differ" if len(rows) > 1 else " differs"
        usual = {n: v for n, v in values.items() if n not in nodes}
        said = ""
        if usual:
            said = f" ({_short(values[nodes[0]])}, elsewhere {_short(next(iter(usual.values())))})"
        return self.finding(
            status,
            f"{name}{more}{said}",
            at=nodes,
            evidence={"variables": rows},
            lines=(f"{name} = {line}" for name, v in list(rows.items())[:6] for line in _lines(v)),
            fix=_drift_fixes(nodes, rows),
            impact="NCCL hangs at the first collective, or aborts"
            if status == "fail"
            else "nodes behave differently: another speed, another path, another amount of output",
            unless="the launcher or the script sets it for all ranks later",
        )


def _short(value: str) -> str:
    line = value.strip().partition("\n")[0]
    return line if len(line) <= 40 else f"{line[:37]}..."


def _lines(values: dict[str, str]) -> tuple[str, ...]:
    return compared({node: _short(value) for node, value in values.items()})


def _drift_fixes(nodes: tuple[str, ...], rows: dict[str, dict[str, str]]) -> Iterator[Fix]:
    """Yield what makes the odd nodes say what the others say."""
    for name, values in rows.items():
        usual = [value for node, value in values.items() if node not in nodes]
        if not usual or name.startswith(("/", "~")):
            continue
        command = f"unset {name}" if usual[0] == UNSET else f"export {name}={quoted(usual[0])}"
        for node in nodes:
            yield Fix(node=node, command=command)


_PREFIXES = ("NCCL_", "TORCH_", "GLOO_")
_LIST = Path(__file__).with_name("known_variables.txt")
# SequenceMatcher ratio: one letter of 18 is 0.97, IFACE for IFNAME 0.89, other variables below
_CLOSE = 0.88


class EnvUnknown(BuiltinCheck, id="env.unknown"):
    """Every NCCL_, TORCH_ and GLOO_ variable is one that is read, not one letter off."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn on names that are close to a known one and are none."""
        nodes_of = grouped(
            (name, node)
            for node, launch in run.launches.items()
            for name in launch.environment
            if name.startswith(_PREFIXES)
        )
        for name, nodes in sorted(nodes_of.items()):
            meant = closest(name)
            if not meant:
                continue
            value = run.launches[nodes[0]].environment[name]
            yield self.warn(
                f"nothing reads {name}; did you mean {meant}?",
                at=nodes,
                evidence={"name": name, "meant": meant, "value": value},
                fix=(Fix(command=f"unset {name}; export {meant}={quoted(value)}"),),
                impact=f"{name} is ignored without a word",
                unless="a plugin of your site, or a newer NCCL or torch, reads it",
                confidence="likely",
            )


def closest(name: str) -> str:
    """Return the known name that `name` nearly is; "" if it is known, or near to none."""
    known = known_variables()
    if name in known:
        return ""
    found = difflib.get_close_matches(name, sorted(known), n=1, cutoff=_CLOSE)
    return found[0] if found else ""


@functools.cache
def known_variables() -> frozenset[str]:
    """Return all names of the list beside this file."""
    lines = (line.partition("#")[0].strip() for line in _LIST.read_text().splitlines())
    return frozenset(line for line in lines if line)


def _is_on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "off", "no")


def _has_gpus(report: NodeReport, at_least: int = 1) -> bool:
    return report.facts.gpu is not None and report.facts.gpu.num_gpus >= at_least


def _has_rdma(report: NodeReport) -> bool:
    return report.facts.rdma is not None and bool(report.facts.rdma.ports)


_Row = tuple[str, Callable[[str], bool], Callable[[NodeReport], bool], str]
_ROWS: tuple[_Row, ...] = (
    ("NCCL_DEBUG", lambda v: v.upper() == "TRACE", _has_gpus, "NCCL writes a line per operation"),
    ("TORCH_DISTRIBUTED_DEBUG", lambda v: v.upper() == "DETAIL", lambda _: True,
     "every collective is preceded by one that compares it on all ranks"),
    ("CUDA_LAUNCH_BLOCKING", _is_on, _has_gpus, "each kernel is waited for"),
    ("NCCL_P2P_DISABLE", _is_on, lambda r: _has_gpus(r, 2), "GPUs do not use NVLink or PCIe"),
    ("NCCL_SHM_DISABLE", _is_on, lambda r: _has_gpus(r, 2), "ranks of a node use the network"),
    ("NCCL_IB_DISABLE", _is_on, _has_rdma, "InfiniBand and RoCE are there, and are not used"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", _is_on, _has_gpus, "each tensor costs a cudaMalloc"),
)  # fmt: skip


class EnvSlowLeft(BuiltinCheck, id="env.slow_left"):
    """No variable is left over from debugging that makes every step slower."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn on those that do something on that node."""
        for name, is_slow, applies, why in _ROWS:
            nodes = {
                node: launch.environment[name]
                for node, launch in run.launches.items()
                if is_slow(launch.environment.get(name, "")) and applies(run.reports[node])
            }
            if nodes:
                value = next(iter(nodes.values()))
                yield self.warn(
                    f"{name}={value} slows the job: {why}",
                    at=nodes,
                    evidence={"variable": name, "values": nodes},
                    fix=on_each(nodes, f"unset {name}"),
                    impact=f"the job runs, but slower: {why}",
                    unless="this run is meant to find a bug",
                )


class EnvOmp(BuiltinCheck, id="env.omp"):
    """OMP_NUM_THREADS times the ranks of a node is no more than its usable cores.

    Where it is not set, torchrun sets 1 for several ranks; other launchers leave each rank as
    many threads as there are cores.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn where ranks would fight for cores."""
        yield from self.not_measured(run, "host")
        causes = grouped((c, r.node) for r in run.present if (c := _excess(run, r)) is not None)
        for (said, threads, nproc, cores), nodes in causes.items():
            fitting = max(1, cores // nproc)
            yield self.warn(
                f"{nproc} ranks x {threads} threads on {cores} cores (OMP_NUM_THREADS {said})",
                at=nodes,
                evidence={"num_threads": threads, "num_ranks": nproc, "num_cores": cores},
                fix=(Fix(command=f"export OMP_NUM_THREADS={fitting}"),),
                impact="the job runs, but its CPU work is slowed by threads that wait for a core",
                unless="the program sets its threads itself, or does no work on the CPU",
            )


def _excess(run: Run, report: NodeReport) -> tuple[str, int, int, int] | None:
    """Return (what is said, threads, ranks, cores) where they do not fit."""
    host, launch = report.facts.host, report.facts.launch
    if host is None or launch is None or host.num_cores < 1 or launch.launcher == "hand":
        return None
    nproc = run.nproc(report.node)
    said = launch.environment.get("OMP_NUM_THREADS", "")
    first = said.partition(",")[0].strip()
    is_set_by_torchrun = launch.mode != "env"
    if first.isdigit() and int(first) > 0:
        threads = int(first)
    elif not said and not is_set_by_torchrun:
        threads = host.num_cores
    else:
        return None
    if nproc * threads <= host.num_cores or threads == 1:
        return None  # one thread each is the least there is: lim.cgroup.cpu counts the ranks
    return (f"= {said}" if said else "is not set", threads, nproc, host.num_cores)
