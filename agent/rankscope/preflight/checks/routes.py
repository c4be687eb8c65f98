"""Why there is no way to the address of a node that is up: translation, routes, the link."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from rankscope.preflight.checks.base import BuiltinCheck, Run, listed, on_each
from rankscope.preflight.checks.blame import Path, blame
from rankscope.preflight.checks.commands import word
from rankscope.preflight.checks.pairs import arrows, dial_line, ordered, owners, shortened
from rankscope.preflight.checks.reroute import FIXES, TITLES, route_text
from rankscope.preflight.checks.ways import Fault, FaultKind, Ways, interfaces_of, is_used, ways
from rankscope.preflight.facts.edges import Dial
from rankscope.preflight.facts.interfaces import Interface
from rankscope.preflight.model import CheckFinding, Fix

_HANGS = "gloo init: the ranks that dial end after minutes, the dialled ones hang > 30 min"
_LUCK = "works today with gloo, which dials the other way around; NCCL dials both ways"


class NetNat(BuiltinCheck, id="net.nat", scope="pair", needs=("peers",)):
    """Where addresses are translated on the way, the one that a node advertises is reached too.

    gloo and NCCL send each other the address of an interface. Behind NAT no other node can dial
    that one, however well the node itself gets out and is reached by another.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail where the job dials such an address; warn where it happens to dial out only."""
        found = ways(run)
        if found.behind:
            yield self._finding(run, found, ordered(run, found.behind))

    def _finding(self, run: Run, found: Ways, nodes: tuple[str, ...]) -> CheckFinding:
        edges = tuple(path for node in nodes for path in found.behind[node])
        is_dialled = any(is_used(run, path) for path in edges)
        known = {node: found.translated[node] for node in nodes}
        own = {node: run.gloo_address(node) for node in nodes}
        first, seen_as = nodes[0], []
        for node, seen in list(known.items())[:3]:
            address, by = next(iter(seen.items()))
            seen_as.append(f"{node} has {own[node]}, and is {address} for {by}")
        title = f"{listed(nodes)} {'is' if len(nodes) == 1 else 'are'} behind NAT: no node reaches "
        title += f"the address {own[first]} that {first} advertises"
        return self.finding(
            "fail" if is_dialled else "warn",
            title,
            nodes=nodes,
            edges=edges,
            evidence={
                "class": _dials(found, edges[0])[0].outcome,
                "advertised": own,
                "seen": known,
            },
            lines=(
                *seen_as,
                *shortened(dial_line(*path, _dials(found, path)) for path in edges),
            ),
            fix=on_each(nodes, _without_nat(run, first), "admin"),
            impact=_HANGS if is_dialled else _LUCK,
            unless="the job runs over another network, such as InfiniBand" if is_dialled else "",
        )  # fmt: skip


def _without_nat(run: Run, node: str) -> str:
    if run.container(node):
        return (
            "# start the container in the network of its host (--network host, hostNetwork: true),"
            " or in one overlay network with the others: a published port is not enough"
        )
    return (
        "# give the nodes one network without NAT between them (a routed subnet, a VPN) and name"
        " its interface in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME: no setting of the job helps"
    )


class NetRoute(BuiltinCheck, id="net.route", scope="pair", needs=("peers",)):
    """Packets find the way to each address that a node advertises: route, router and link.

    Only where no port of that address answers, and the kernel's own tables say why.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Name the node whose choice or table it is, with what mends it there."""
        found = ways(run)
        yield from self._elsewhere(run, found)
        groups: dict[tuple[FaultKind, str], list[Fault]] = defaultdict(list)
        for fault in _plain(found.faults):
            groups[fault.kind, "" if fault.kind == "none" else fault.node].append(fault)
        for (kind, _), faults in groups.items():
            if kind == "silent":
                continue
            yield self._finding(run, found, kind, faults)
        yield from self._silent(run, found)
        yield from self._endpoint(run)

    def _elsewhere(self, run: Run, found: Ways) -> Iterator[CheckFinding]:
        """The address that a node advertises is on an interface that others do not reach."""
        nodes = ordered(run, found.elsewhere)
        if not nodes:
            return
        edges = tuple(path for node in nodes for path in found.elsewhere[node])
        is_dialled = any(is_used(run, path) for path in edges)
        where = {node: _choice(run, found, node) for node in nodes}
        own, better = where[nodes[0]]
        yield self.finding(
            "fail" if is_dialled else "warn",
            f"{listed(nodes)}: others do not reach the address that gloo advertises "
            f"({_shown(own, run.gloo_address(nodes[0]))}), and reach {better}",
            nodes=nodes,
            edges=edges,
            evidence={
                "class": _dials(found, edges[0])[0].outcome,
                "advertised": {node: run.gloo_address(node) for node in nodes},
                "reached": {node: address for node, (_, address) in where.items()},
            },
            lines=(
                *(f"{node}: {how}" for node in nodes[:3] if (how := _how(run, node))),
                *shortened(dial_line(*path, _dials(found, path)) for path in edges),
            ),
            fix=(fix for node in nodes for fix in _take(run, node, *where[node])),
            impact=_HANGS if is_dialled else _LUCK,
        )

    def _finding(self, run: Run, found: Ways, kind: FaultKind, faults: list[Fault]) -> CheckFinding:
        nodes = ordered(run, {fault.node for fault in faults})
        edges = found.pairs(tuple(faults))
        first = faults[0]
        peers = ordered(run, {fault.peer for fault in faults})
        return self.fail(
            f"{listed(nodes)}{':' if kind == 'none' else ''} {TITLES[kind](first, listed(peers))}",
            nodes=nodes,
            edges=edges,
            evidence={
                "class": _dials(found, (first.node, first.peer))[0].outcome,
                "kind": kind,
                "routes": {f"{f.node}->{f.peer}": route_text(f.route) for f in faults[:16]},
            },
            lines=(
                *shortened(
                    f"{f.node}: route to {f.address} ({f.peer}): {route_text(f.route)}"
                    for f in faults
                ),
                *shortened(dial_line(*path, _dials(found, path)) for path in edges),
            ),
            fix=(
                fix
                for node in nodes
                for fix in FIXES[kind](run, node, [f for f in faults if f.node == node])
            ),
            impact=_HANGS,
            confidence="proven" if kind in ("refused", "none", "neighbour") else "likely",
        )

    def _silent(self, run: Run, found: Ways) -> Iterator[CheckFinding]:
        """Both are on one link, by their addresses, and do not hear each other there."""
        faults = [fault for fault in _plain(found.faults) if fault.kind == "silent"]
        paths = found.pairs(tuple(faults))
        tested = [(start, end) for start, end, edge in run.edges() if edge.ephemeral]
        for one in blame(list(paths), tested):
            who = listed(one.nodes) if one.nodes else arrows(one.paths)
            nears = {(f.node, f.near.name) for f in faults if f.near is not None}
            yield self.fail(
                f"{who}: no answer to ARP: the addresses are of one network, the links are not",
                nodes=one.nodes,
                edges=one.paths,
                evidence={"class": "no-arp", "kind": "silent", "side": one.side},
                lines=shortened(dial_line(*path, _dials(found, path)) for path in one.paths),
                fix=(
                    Fix(
                        node=node,
                        command=f"# see to {name}: is its port of the switch in the VLAN of the "
                        "others, and does a filter for ARP stand there?",
                        owner="admin",
                    )
                    for node, name in sorted(nears)
                    if node in one.nodes or (not one.nodes and node in one.paths[0])
                ),
                impact=_HANGS,
                confidence="likely",
            )

    def _endpoint(self, run: Run) -> Iterator[CheckFinding]:
        """MASTER_ADDR is an address of the right node that others do not reach."""
        lost = _unreached_endpoint(run)
        if not lost:
            return
        first, dial = next(iter(lost.items()))
        better = _reached_address(run, first)
        row = next((row for row in interfaces_of(run, run.master) if _has(row, dial.address)), None)
        yield self.fail(
            f"{listed(ordered(run, lost))} cannot reach MASTER_ADDR {_shown(row, dial.address)} of "
            f"{run.master}, and reach it at {better}",
            nodes=(run.master,),
            edges=((node, run.master) for node in lost),
            evidence={"class": dial.outcome, "kind": "endpoint", "reached": better},
            lines=shortened(dial_line(node, run.master, [one]) for node, one in lost.items()),
            fix=(Fix(command=_point_to(run, better)),),
            impact="the ranks never meet: the end after 15 to 30 min",
        )


def _plain(faults: Iterable[Fault]) -> Iterator[Fault]:
    """Leave out what another fault of the pair explains: silence is the weakest."""
    faults = tuple(faults)
    strong = {frozenset((f.node, f.peer)) for f in faults if f.kind != "silent"}
    for fault in faults:
        if fault.kind != "silent" or frozenset((fault.node, fault.peer)) not in strong:
            yield fault


def _dials(found: Ways, path: Path) -> tuple[Dial, ...]:
    return found.closed[path].ephemeral


def _has(row: Interface, address: str) -> bool:
    return address in [text.partition("/")[0] for text in row.addresses]


def _shown(row: Interface | None, address: str) -> str:
    return f"{address} of {row.name}" if row is not None else address


def _choice(run: Run, found: Ways, node: str) -> tuple[Interface | None, str]:
    """Return the interface of the advertised address, and the address that others reach."""
    path = found.elsewhere[node][0]
    detour = found.closed[path].detour
    assert detour is not None
    own = run.gloo_address(node)
    return next((r for r in interfaces_of(run, node) if _has(r, own)), None), detour.address


def _how(run: Run, node: str) -> str:
    facts = run.reports[node].facts.interfaces
    return facts.gloo[0].how if facts is not None and facts.gloo else ""


def _take(run: Run, node: str, own: Interface | None, better: str) -> Iterator[Fix]:
    """Yield what makes gloo, and NCCL, take the interface that others reach."""
    row = next((row for row in interfaces_of(run, node) if _has(row, better)), None)
    facts = run.reports[node].facts.names
    first = row.addresses[0].partition("/")[0] if row is not None and row.addresses else ""
    if row is None or first != better or (own is not None and own.name == row.name):
        name = facts.hostname if facts is not None else node
        text = f"# let the own name {name} mean {better} there: /etc/hosts, or the name server"
        yield Fix(node=node, command=text, owner="admin")
        return
    yield Fix(node=node, command=f"export GLOO_SOCKET_IFNAME={word(row.name)}")
    if run.backend == "nccl":
        yield Fix(node=node, command=f"export NCCL_SOCKET_IFNAME={word('=' + row.name)}")


_UNREACHED = ("no-route", "no-arp", "prohibited", "drop")


def _unreached_endpoint(run: Run) -> dict[str, Dial]:
    """Return who reaches the master's node, on the same port, but not by MASTER_ADDR."""
    owned = owners(run)
    lost = {}
    for report in run.present:
        edge = report.edges.get(run.master)
        if edge is None or edge.master is None or edge.master.outcome not in _UNREACHED:
            continue
        mesh, master = edge.mesh, edge.master
        is_reached = mesh is not None and mesh.outcome == "ok" and mesh.address != master.address
        is_right = owned.get(master.address, frozenset()) == {run.master}
        is_port = mesh is not None and mesh.port == master.port
        if is_reached and is_right and (is_port or master.outcome in ("no-route", "no-arp")):
            lost[report.node] = master
    return lost


def _reached_address(run: Run, node: str) -> str:
    mesh = run.reports[node].edges[run.master].mesh
    assert mesh is not None
    return mesh.address


def _point_to(run: Run, address: str) -> str:
    """Return the setting of the endpoint, as this launch takes it."""
    is_torchrun = any(launch.launcher == "torchrun" for launch in run.launches.values())
    if run.mode == "c10d":
        host = f"[{address}]" if ":" in address else address
        return f"torchrun --rdzv-endpoint {word(host)}:{run.master_port} ..."
    if run.mode == "static" and is_torchrun:
        return f"torchrun --master-addr {word(address)} ..."
    return f"export MASTER_ADDR={word(address)}"
