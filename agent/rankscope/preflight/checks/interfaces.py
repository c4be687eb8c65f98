"""Interfaces and routes: what gloo and NCCL take, and whether peers can reach it."""

from __future__ import annotations

import functools
import ipaddress
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rankscope.preflight.checks.base import BuiltinCheck, Run, grouped, listed, on_each
from rankscope.preflight.checks.collective import difference
from rankscope.preflight.checks.commands import word
from rankscope.preflight.checks.comparing import by_value
from rankscope.preflight.checks.meeting import is_address, is_local
from rankscope.preflight.checks.names import loopback_by_name
from rankscope.preflight.facts.choice import Choice, matches, nccl_settings
from rankscope.preflight.facts.edges import EdgeFacts
from rankscope.preflight.facts.interfaces import Interface, InterfaceFacts, kind_of
from rankscope.preflight.model import CheckFinding, Fix, NodeReport, Status

GLOO, NCCL, HCA = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"


def best_interface(run: Run, node: str) -> str:
    """Return the interface to recommend: one by which peers were reached, else the first real."""
    used = {edge.source_address for edge in run.reports[node].edges.values()}
    real = [row for row in _rows(run, node) if is_real(row)]
    reached = [row for row in real if used & set(addresses_of(row))]
    return next((row.name for row in (*reached, *real)), "")


def _export(variable: str, value: str) -> str:
    """Return the setting of a variable; with "=" behind its name, to exactly this value of NCCL."""
    name = variable.removesuffix("=")
    return f"export {name}={word(variable[len(name) :] + value)}"


def _choose(run: Run, nodes: Iterable[str], variable: str) -> Iterator[Fix]:
    """Yield, for each node, the setting of `variable` that names its best interface."""
    for node in nodes:
        if name := best_interface(run, node):
            yield Fix(node=node, command=_export(variable, name))


def _rows(run: Run, node: str) -> tuple[Interface, ...]:
    facts = run.reports[node].facts.interfaces
    return facts.interfaces if facts is not None else ()


def is_real(row: Interface) -> bool:
    """Return whether an interface may carry traffic to other machines."""
    return row.is_up and not row.is_loopback and not row.kind and bool(row.addresses)


def addresses_of(row: Interface) -> Iterator[str]:
    """Yield the addresses without their prefix length."""
    for text in row.addresses:
        yield text.partition("/")[0]


def interface_with(facts: InterfaceFacts, address: str) -> Interface | None:
    """Return the interface that has an address."""
    return next((row for row in facts.interfaces if address in addresses_of(row)), None)


_MAX_ROUTES = 8  # commands of one finding
STRICT = 1  # rp_filter: drop what comes in where the reply would not go out


@dataclass(frozen=True)
class Asymmetry:
    """`node` advertises one address, and sends to `peer` from another."""

    node: str
    peer: str
    own: Interface  # whose address gloo advertises
    own_address: str
    source: Interface
    source_address: str
    is_broken: bool  # a dial between the two has failed, in either direction
    dropped_by: str = ""  # the node whose strict rp_filter drops one direction
    dropped_at: str = ""  # at that interface

    @property
    def dropped_edge(self) -> tuple[str, str]:
        """The direction that the filter drops."""
        other = self.node if self.dropped_by == self.peer else self.peer
        return other, self.dropped_by


def asymmetric_paths(run: Run) -> Iterator[Asymmetry]:
    """Yield the paths whose two directions use different addresses of a node."""
    for node, peer, edge in run.edges():
        own_address = run.gloo_address(node)
        source_address = _source(edge)
        if source_address in ("", own_address) or not own_address or is_local(own_address):
            continue  # nearly all of a million paths end here
        facts = run.reports[node].facts.interfaces
        if facts is None:
            continue
        own = interface_with(facts, own_address)
        source = interface_with(facts, source_address)
        if own is None or source is None or own.name == source.name:
            continue
        if own.is_loopback or own.kind or source.is_loopback:
            continue  # other checks' business: that address is no good for any peer
        dropped = _dropping_filter(run, node, peer, own, source_address)
        is_broken = _has_failed(run, node, peer) or _has_failed(run, peer, node)
        yield Asymmetry(node, peer, own, own_address, source, source_address, is_broken, *dropped)


def _source(edge: EdgeFacts) -> str:
    """Return the address of ours that a call to the peer's advertised address comes from.

    Where such a call was answered it says so itself. Else it is that of the route to the peer's
    name: known only if the name means the advertised address, and not another network.
    """
    for dial in edge.ephemeral:
        if dial.outcome == "ok" and dial.local_address:
            return dial.local_address
    if edge.mesh is None or not edge.ephemeral:
        return edge.source_address
    is_same = edge.mesh.address == edge.ephemeral[0].address
    return edge.source_address if is_same else ""


def _dropping_filter(
    run: Run, node: str, peer: str, own: Interface, source_address: str
) -> tuple[str, str]:
    """Return which node's filter drops, and at which interface; ("", "") if none does.

    The peer drops what comes from an address that it would answer by another interface; the node
    itself drops what comes in by the interface whose address it advertises, if its replies leave by
    another one.
    """
    report = run.reports.get(peer)
    theirs = report.facts.interfaces if report is not None else None
    if theirs is not None and _has_failed(run, node, peer):
        entry = interface_with(theirs, run.gloo_address(peer))
        if entry is not None and entry.rp_filter == STRICT:
            if _network_of(theirs, source_address) not in ("", entry.name):
                return peer, entry.name
    if own.rp_filter == STRICT and _has_failed(run, peer, node):
        return node, own.name
    return "", ""


def _network_of(facts: InterfaceFacts, address: str) -> str:
    """Return the interface in whose subnet an address is: that is where replies leave."""
    target = ipaddress.ip_address(address)
    for row in facts.interfaces:
        if row.is_up and any(target in ipaddress.ip_interface(t).network for t in row.addresses):
            return row.name
    return ""


def _has_failed(run: Run, start: str, end: str) -> bool:
    edge = run.edge(start, end)
    if edge is None:
        return False
    dials = [*edge.ephemeral, *(d for d in (edge.mesh, edge.master) if d is not None)]
    return any(dial.outcome not in ("ok", "refused", "unresolved") for dial in dials)


class NetIfaceGloo(BuiltinCheck, id="net.iface.gloo", needs=("peers",)):
    """The interface that gloo takes has an address, and is not loopback.

    Worked out from gloo's rules; where torch is there, gloo itself is asked.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail on an interface that carries nothing to others."""
        yield from self.not_measured(run, "interfaces")
        causes = grouped((cause, r.node) for r in run.present if (cause := _fault(r)))
        for cause, nodes in causes.items():
            yield self.finding(
                "fail" if run.backend == "gloo" else "warn",
                cause,
                at=nodes,
                evidence={node: _evidence(run.reports[node]) for node in nodes},
                lines=(
                    difference(run, n) or f"{n}: emulated {_emulated(run.reports[n])}"
                    for n in nodes[:4]
                ),
                fix=_choose(run, nodes, GLOO),
                impact="gloo init: other ranks are refused or hang for more than 30 min",
                unless="the job never uses gloo" if run.backend != "gloo" else "",
            )


def _fault(report: NodeReport) -> str:
    """Return why gloo's choice is of no use; "" where it is, or another check says it."""
    facts, smoke = report.facts.interfaces, report.facts.smoke
    if facts is None or not facts.gloo or loopback_by_name(report) is not None:
        return ""
    truth = next((c for c in (smoke.gloo if smoke is not None else ()) if c.address), None)
    chosen = truth or facts.gloo[0]
    if chosen.problem and not chosen.address:
        # a name that no interface has is net.iface.missing's
        return f"{chosen.problem} ({chosen.how})" if "has no address" in chosen.problem else ""
    if is_local(chosen.address):
        how = facts.gloo[0].how if truth is None else "gloo itself, asked"
        return f"gloo advertises {chosen.address}, which is each node itself ({how})"
    return ""


def _emulated(report: NodeReport) -> str:
    facts = report.facts.interfaces
    choice = facts.gloo[0] if facts is not None and facts.gloo else None
    if choice is None:
        return "nothing"
    return f"{choice.interface or '-'} {choice.address or '-'}: {choice.how}"


def _evidence(report: NodeReport) -> dict[str, object]:
    facts, smoke = report.facts.interfaces, report.facts.smoke
    return {
        "emulated": [c.address for c in facts.gloo] if facts is not None else [],
        "asked": [c.address for c in smoke.gloo] if smoke is not None else [],
    }


class NetIfaceNccl(BuiltinCheck, id="net.iface.nccl", needs=("peers",)):
    """NCCL takes no bridge, tunnel or loopback among its interfaces.

    It leaves out only names that begin with docker, lo and virbr: br-*, cni0, veth* and others
    are taken, and it connects over each of them.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn on a virtual interface among the chosen; fail where it comes first."""
        if run.backend != "nccl":
            yield self.skipped(f"the backend is {run.backend}")
            return
        yield from self.not_measured(run, "interfaces")
        bad = {
            node: (facts.nccl[0].interface, names)
            for node, facts in run.each(lambda facts: facts.interfaces).items()
            if (names := tuple(c.interface for c in facts.nccl if _is_bad(c)))
        }
        causes = grouped(((first == names[0], names), n) for n, (first, names) in bad.items())
        for (is_first, names), nodes in causes.items():
            yield self._finding(run, is_first, names, nodes)

    def _finding(
        self, run: Run, is_first: bool, bad: tuple[str, ...], nodes: list[str]
    ) -> CheckFinding:
        kinds = ", ".join(f"{name} ({kind_of(name) or 'loopback'})" for name in bad)
        return self.finding(
            "fail" if is_first else "warn",
            f"{listed(nodes)}: NCCL will take {kinds}" + (" first" if is_first else " too"),
            nodes=nodes,
            evidence={node: _chosen(run, node) for node in nodes},
            lines=(f"{node}: {', '.join(_chosen(run, node))}" for node in nodes[:4]),
            fix=_choose(run, nodes, "NCCL_SOCKET_IFNAME="),
            impact="NCCL init: ranks cannot reach the address that NCCL advertises, and hang or "
            "fail after 34 tries"
            if is_first
            else "NCCL connects over it as well: init hangs where the other end has none",
            unless="NCCL uses InfiniBand or a plugin, and the nodes reach each other by it",
            confidence="likely",
        )


def _is_bad(choice: Choice) -> bool:
    is_loopback = choice.interface == "lo"
    return bool(choice.interface) and (is_loopback or bool(kind_of(choice.interface)))


def _chosen(run: Run, node: str) -> list[str]:
    facts = run.reports[node].facts.interfaces
    return [f"{c.interface} {c.address}" for c in facts.nccl] if facts is not None else []


class NetIfaceMissing(BuiltinCheck, id="net.iface.missing", scope="all"):
    """GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME and NCCL_IB_HCA name what every node has."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail where the backend in use names an interface that is not there; else warn."""
        yield from self.not_measured(run, "interfaces")
        causes = grouped((cause, r.node) for r in run.present for cause in _missing_interfaces(r))
        for (variable, value, problem), nodes in causes.items():
            used = (variable == GLOO) == (run.backend == "gloo")
            status: Status = "fail" if used else "warn"
            there = {node: _names(run, node) for node in nodes}
            yield self.finding(
                status,
                f"{variable}={value}, but {problem}",
                at=nodes,
                evidence={"variable": variable, "value": value, "interfaces": there},
                lines=(f"{node} has {', '.join(there[node])}" for node in nodes[:4]),
                fix=_missing_fixes(run, variable, nodes),
                impact=_MISSING[variable],
                unless="" if used else f"the job runs with {run.backend} alone",
            )


def _missing_interfaces(report: NodeReport) -> Iterator[tuple[str, str, str]]:
    """Yield (variable, value, what is wrong)."""
    facts, launch = report.facts.interfaces, report.facts.launch
    if facts is None:
        return
    for choice in facts.gloo:
        if choice.problem and choice.how.startswith(f"{GLOO}=") and not choice.address:
            if "has no address" not in choice.problem:
                yield GLOO, choice.how.partition("=")[2], choice.problem
    for choice in facts.nccl:
        if choice.problem and choice.how.startswith(f"{NCCL}="):
            yield NCCL, choice.how.partition("=")[2], choice.problem
    rdma = report.facts.rdma
    if launch is None or rdma is None or not rdma.ports:
        return
    hca = nccl_settings(launch.environment, launch.conf_files).get(HCA, "")
    devices = {port.device for port in rdma.ports}
    if hca and not any(matches(device, hca) for device in devices):
        yield HCA, hca, f"the devices are {', '.join(sorted(devices))}"


def _names(run: Run, node: str) -> list[str]:
    return [row.name for row in _rows(run, node)]


def _missing_fixes(run: Run, variable: str, nodes: list[str]) -> Iterator[Fix]:
    """Yield names that are there: one for all nodes if there is one, else each node's own."""
    if variable == HCA:
        yield from on_each(nodes, f"unset {HCA}")
        return
    exact = f"{variable}=" if variable == NCCL else variable
    everywhere = [
        {row.name for row in facts.interfaces if is_real(row)}
        for facts in run.each(lambda facts: facts.interfaces).values()
    ]
    common = set.intersection(*everywhere) if everywhere else set()
    best = {node: name for node in nodes if (name := best_interface(run, node))}
    for name in best.values():
        if name in common:
            yield Fix(command=_export(exact, name))
            return
    for node, name in best.items():
        yield Fix(node=node, command=_export(exact, name))


_MISSING = {
    GLOO: "that node fails at once: 'Unable to find address for'; the others wait 30 min",
    NCCL: "NCCL init fails on that node: 'no socket interface found'; the others hang",
    HCA: "NCCL finds no such device and falls back to sockets, many times slower, or fails",
}


class NetIfaceVirtual(BuiltinCheck, id="net.iface.virtual", scope="all", needs=("peers",)):
    """The interface that gloo takes is no docker0, bridge or tunnel that peers cannot reach.

    docker0 has the same address on every machine, so that each rank calls itself.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail on a virtual interface, unless a peer has connected to it."""
        yield from self.not_measured(run, "interfaces")
        chosen = {r.node: c for r in run.present if (c := _choice(r)) is not None and c.address}
        owners = by_value({node: choice.address for node, choice in chosen.items()})
        groups = grouped(
            (choice.interface, node)
            for node, choice in chosen.items()
            if kind_of(choice.interface)
            and (len(owners[choice.address]) > 1 or not _is_reached(run, node, choice))
        )
        for interface, nodes in groups.items():
            yield self._finding(run, interface, nodes, chosen)

    def _finding(
        self, run: Run, interface: str, nodes: list[str], chosen: dict[str, Choice]
    ) -> CheckFinding:
        addresses = sorted({chosen[node].address for node in nodes})
        is_twin = len(nodes) > 1 and len(addresses) == 1
        title = f"{listed(nodes)}: gloo takes {interface} ({kind_of(interface)})"
        if is_twin:
            title += f", which is {addresses[0]} on all of them"
        return self.finding(
            "fail" if run.backend == "gloo" else "warn",
            title,
            nodes=nodes,
            evidence={"interface": interface, "addresses": {n: chosen[n].address for n in nodes}},
            lines=(f"{n}: {chosen[n].address}: {chosen[n].how}" for n in nodes[:4]),
            fix=_choose(run, nodes, GLOO),
            impact=f"gloo init: 'Connection refused, remote=[{addresses[0]}]' on some ranks after "
            "15 to 30 s, the rest hang for more than 30 min",
            unless="" if is_twin else "the network behind it joins the machines",
            confidence="proven" if is_twin else "likely",
        )


def _choice(report: NodeReport) -> Choice | None:
    """Return what gloo takes: its own answer where it was asked, with the interface's name."""
    facts, smoke = report.facts.interfaces, report.facts.smoke
    if facts is None:
        return None
    asked = next((c for c in (smoke.gloo if smoke is not None else ()) if c.address), None)
    choice = asked or (facts.gloo[0] if facts.gloo else None)
    if choice is None or is_local(choice.address):
        return None
    if not choice.interface:
        row = interface_with(facts, choice.address)
        return Choice(interface=row.name if row else "", address=choice.address, how=choice.how)
    return choice


def _is_reached(run: Run, node: str, choice: Choice) -> bool:
    """Return whether some peer's connection came to that address, answered by that node."""
    edges = (report.edges[node] for report in run.present if node in report.edges)
    dials = (dial for edge in edges for dial in (*edge.ephemeral, edge.mesh) if dial is not None)
    return any(dial.outcome == "ok" and dial.address == choice.address for dial in dials)


class NetSubnet(BuiltinCheck, id="net.subnet", scope="all", needs=("peers",)):
    """The interfaces of a node are in subnets that do not overlap.

    With two interfaces in one subnet the kernel sends by the first route, whichever interface a
    library has bound: what came in by one leaves by the other.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn on overlapping IPv4 subnets among the real interfaces of a node."""
        yield from self.not_measured(run, "interfaces")
        interfaces = run.each(lambda facts: facts.interfaces)
        causes = grouped((pair, n) for n, facts in interfaces.items() for pair in _overlaps(facts))
        for (first, second, subnet), nodes in causes.items():
            yield self.warn(
                f"{first} and {second} are both in {subnet}",
                at=nodes,
                evidence={"interfaces": [first, second], "subnet": subnet},
                fix=(
                    Fix(command=f"export NCCL_SOCKET_IFNAME=={first} GLOO_SOCKET_IFNAME={first}"),
                ),
                impact="traffic of both leaves by one of them; replies that a strict rp_filter or "
                "a switch does not expect are lost",
                unless="source routing is set up for both (ip rule)",
                confidence="likely",
            )


def _overlaps(facts: InterfaceFacts) -> Iterator[tuple[str, str, str]]:
    slaves = {slave for row in facts.interfaces for slave in row.bond_slaves}
    networks = [
        (row.name, interface.network)
        for row in facts.interfaces
        if is_real(row) and row.name not in slaves
        for interface in map(ipaddress.ip_interface, row.addresses)
        if interface.version == 4 and interface.network.prefixlen < 32
        and not interface.ip.is_link_local
    ]  # fmt: skip
    seen = set()
    for (name, network), (other, second) in itertools.combinations(networks, 2):
        if name != other and (name, other) not in seen and network.overlaps(second):
            seen.add((name, other))
            yield name, other, str(max(network, second, key=lambda n: n.prefixlen))


class NetDupIp(BuiltinCheck, id="net.dup_ip", scope="all", needs=("peers",)):
    """No address of a real interface is on two nodes."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail where the job would use the address, warn where it is idle."""
        yield from self.not_measured(run, "interfaces")
        owners: dict[str, dict[str, str]] = {}  # address: node: interface
        for node, facts in run.each(lambda facts: facts.interfaces).items():
            for address, interface in _real_addresses(facts):
                owners.setdefault(address, {})[node] = interface
        groups: dict[tuple[str, ...], list[str]] = {}
        for address, where in owners.items():
            nodes = _distinct(run, tuple(where))
            if len(nodes) > 1:
                groups.setdefault(nodes, []).append(address)
        used = _used_addresses(run) if groups else frozenset()
        for nodes, addresses in groups.items():
            yield self._finding(run, nodes, addresses, owners, used)

    def _finding(
        self,
        run: Run,
        nodes: tuple[str, ...],
        addresses: list[str],
        owners: dict[str, dict[str, str]],
        used: frozenset[str],
    ) -> CheckFinding:
        address = next((a for a in addresses if a in used), addresses[0])
        is_used = address in used
        where = owners[address]
        return self.finding(
            "fail" if is_used else "warn",
            f"{listed(nodes)} have the same address {address}",
            nodes=nodes,
            evidence={a: {node: owners[a][node] for node in nodes} for a in addresses},
            lines=(f"{node}: {address} on {where[node]}" for node in nodes[:4]),
            fix=_apart(run, nodes, address, where),
            impact="the first to answer is taken for the other: store time-outs, hangs of more "
            "than 30 min"
            if is_used
            else "nothing, as long as no library takes this interface",
            unless="" if is_used else "the two interfaces are in networks that never meet",
            confidence="proven" if is_used else "likely",
        )


def _real_addresses(facts: InterfaceFacts) -> Iterator[tuple[str, str]]:
    for row in facts.interfaces:
        if is_real(row):
            for address in addresses_of(row):
                if not ipaddress.ip_address(address).is_link_local:
                    yield address, row.name


def _distinct(run: Run, nodes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the nodes without those that are the same place as an earlier one (`host.dup`)."""
    seen: set[tuple[str, int]] = set()
    distinct = []
    for node in nodes:
        host = run.reports[node].facts.host
        place = (host.boot_id, host.network_namespace) if host is not None else (node, 0)
        if place not in seen or not all(place):
            distinct.append(node)
        seen.add(place)
    return tuple(distinct)


def _used_addresses(run: Run) -> frozenset[str]:
    """Return the addresses that the job would advertise or dial."""
    used: set[str] = set()
    for facts in run.each(lambda facts: facts.interfaces).values():
        choices = (*facts.gloo, *(facts.nccl if run.backend == "nccl" else ()))
        used.update(choice.address for choice in choices)
    for _, _, edge in run.edges():
        used.add(edge.source_address)
        if edge.resolved is not None:
            used.update(edge.resolved.addresses)
    return frozenset(used)


def _apart(run: Run, nodes: tuple[str, ...], address: str, where: dict[str, str]) -> Iterator[Fix]:
    """Yield what takes the address from all but the node whose name leads to it.

    Where names do not say whose it is, or a node has no other address by which it stays reachable,
    a person must decide: the command would cut the node off.
    """
    named = {node: _named(run, node) for node in nodes}
    rightful = [node for node in nodes if address in named[node]]
    wrong = nodes if len(rightful) != 1 else tuple(n for n in nodes if n not in rightful)
    taken = {
        a for facts in run.each(lambda f: f.interfaces).values() for a, _ in _real_addresses(facts)
    }
    for node in wrong:
        others = listed(tuple(one for one in nodes if one != node))
        text = (
            f"# give {node} an address of its own: {address} on {where[node]} is also on {others}"
        )
        if wrong is not nodes:
            text = _replaced(run, node, address, where[node], named[node] - taken) or text
        yield Fix(node=node, command=text, owner="admin")


def _named(run: Run, node: str) -> set[str]:
    """Return where the name of a node leads, for itself and for its peers."""
    facts = run.reports[node].facts.names
    answers = [facts.own] if facts is not None else []
    answers += [edge.resolved for _, end, edge in run.edges() if end == node and edge.resolved]
    return {a for one in answers for a in one.addresses if is_address(a) and not is_local(a)}


def _replaced(run: Run, node: str, address: str, interface: str, free: set[str]) -> str:
    """Return the command that takes an address away; "" if the node would be left with none."""
    old, name = _with_length(run, node, address), word(interface)
    removed = f"sudo ip addr del {old} dev {name}"
    network = ipaddress.ip_interface(old).network
    own = next((one for one in sorted(free) if ipaddress.ip_address(one) in network), "")
    if own:
        # the new one takes the place of the old one, with the routes that lead by it
        promoted = f"sudo sysctl -w {_setting(interface, 'promote_secondaries=1')} && "
        added = f"sudo ip addr add {own}/{network.prefixlen} dev {name} && {removed}"
        return f"{'' if ':' in own else promoted}{added}  # and in its network configuration"
    kept = any(is_real(row) and set(row.addresses) - {old} for row in _rows(run, node))
    return f"{removed}  # and from its network configuration" if kept else ""


def _setting(interface: str, setting: str) -> str:
    """Return a setting of an interface for sysctl; a name with a dot needs the other notation."""
    if "." in interface:
        return word(f"net/ipv4/conf/{interface}/{setting}")
    return word(f"net.ipv4.conf.{interface}.{setting}")


def _with_length(run: Run, node: str, address: str) -> str:
    texts = [text for row in _rows(run, node) for text in row.addresses]
    return next((text for text in texts if text.partition("/")[0] == address), address)


class NetRouteSym(BuiltinCheck, id="net.route.sym", scope="pair", needs=("peers",)):
    """Packets leave with the address that the node advertises."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail where such a path does not work, warn where it does."""
        by_node: dict[str, list[Asymmetry]] = {}
        for path in asymmetric_paths(run):
            if not path.dropped_by:  # that is net.rp_filter's
                by_node.setdefault(path.node, []).append(path)
        for node, paths in by_node.items():
            yield self._finding(run, node, paths)

    def _finding(self, run: Run, node: str, paths: list[Asymmetry]) -> CheckFinding:
        first, peers = paths[0], [path.peer for path in paths]
        is_broken = any(path.is_broken for path in paths)
        return self.finding(
            "fail" if is_broken else "warn",
            f"{node} calls {listed(peers)} from {first.source_address} "
            f"({first.source.name}), but advertises {first.own_address} ({first.own.name})",
            nodes=(node,),
            edges=((node, peer) for peer in peers),
            evidence={p.peer: {"source_address": p.source_address} for p in paths},
            lines=(
                f"{node}->{p.peer} is sent from {p.source_address}, of {p.source.name}"
                for p in paths[:4]
            ),
            fix=_route(run, first),
            impact="connections are lost where a firewall or rp_filter sees only one direction"
            if is_broken
            else "works today; fails where rp_filter is 1 or a firewall follows connections",
            unless="the two interfaces are meant to share the load",
        )


def _route(run: Run, path: Asymmetry) -> tuple[Fix, ...]:
    """Return the route that sends packets out where the answers come in."""
    peer = run.gloo_address(path.peer)
    if not peer:
        return ()
    command = f"sudo ip route replace {peer} dev {word(path.own.name)} src {path.own_address}"
    return (
        Fix(node=path.node, command=command, owner="admin"),
        Fix(node=path.node, command=f"export GLOO_SOCKET_IFNAME={word(path.source.name)}"),
    )


class NetRpFilter(BuiltinCheck, id="net.rp_filter", needs=("peers",)):
    """No strict rp_filter drops packets that come in by another way than replies go out.

    A strict filter by itself is no fault: only with a route that leaves by another interface, and
    a dial that failed.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail where the three meet."""
        by_place: dict[tuple[str, str], list[Asymmetry]] = {}
        for path in asymmetric_paths(run):
            if path.dropped_by:
                by_place.setdefault((path.dropped_by, path.dropped_at), []).append(path)
        for (node, interface), paths in by_place.items():
            yield self._finding(run, node, interface, paths)

    def _finding(self, run: Run, node: str, interface: str, paths: list[Asymmetry]) -> CheckFinding:
        edges = tuple(dict.fromkeys(path.dropped_edge for path in paths))
        # the kernel takes the larger of "all" and the interface's own: 2 there is loose, whatever
        # "all" says
        command = f"sudo sysctl -w {_setting(interface, 'rp_filter=2')}"
        return self.fail(
            f"{node} drops what {listed([start for start, _ in edges])} sends to "
            f"{interface}: strict rp_filter, and the way back is another one",
            nodes=(node,),
            edges=edges,
            evidence={
                "rp_filter": STRICT,
                "interface": interface,
                "paths": [
                    {
                        "from": p.node,
                        "to": p.peer,
                        "source": p.source_address,
                        "told": p.own_address,
                    }
                    for p in paths
                ],
            },
            lines=(
                f"{p.node} calls {p.peer} from {p.source_address} ({p.source.name}), but "
                f"advertises {p.own_address} ({p.own.name})"
                for p in paths[:4]
            ),
            # the route mends the cause, the filter alone only where the other way back works
            fix=(
                *(fix for p in paths[:_MAX_ROUTES] for fix in _route(run, p)[:1]),
                *on_each((node,), command, "admin"),
            ),
            impact="works or hangs for more than 30 min, by which node has the higher address: "
            "one direction is dropped, the other is not",
            confidence="likely",
        )


# Ethernet allows 1e-12 bit errors, 1e-8 of full packets: this is 10,000 times more
_MAX_ERROR_RATIO = 1e-4
_MIN_ERRORS = 1000  # fewer say nothing: a cable that was plugged in makes some
_MAX_CARRIER_CHANGES = 100  # since boot; a start makes 2 to 6, a bad cable hundreds a day


class NetNic(BuiltinCheck, id="net.nic", scope="all", needs=("peers",)):
    """The interface that the job uses has full duplex, the usual speed and no errors."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn on what makes it slow."""
        yield from self.not_measured(run, "interfaces")
        used = {
            r.node: row for r in run.present if (row := _used_interface(run, r.node)) is not None
        }
        for node, row in used.items():
            for fault in _nic_faults(row):
                yield self._finding((node,), row, fault)
        yield from self._slower(used)

    def _slower(self, used: dict[str, Interface]) -> Iterator[CheckFinding]:
        speeds = {node: row.speed_mbit for node, row in used.items() if row.speed_mbit > 0}
        groups = by_value(speeds)
        usual = next(iter(groups), 0)
        if not usual or 2 * len(groups[usual]) <= len(speeds):
            return  # no majority, no reproach
        for speed, nodes in groups.items():
            if speed < usual:
                fault = f"runs at {speed} Mbit/s, most others at {usual} Mbit/s"
                yield self._finding(nodes, used[nodes[0]], fault)

    def _finding(self, nodes: tuple[str, ...], row: Interface, fault: str) -> CheckFinding:
        return self.warn(
            f"{row.name} {fault}",
            at=nodes,
            evidence={
                "interface": row.name,
                "speed_mbit": row.speed_mbit,
                "duplex": row.duplex,
                "num_errors": row.num_errors,
                "num_packets": row.num_packets,
                "carrier_changes": row.carrier_changes,
            },
            fix=(
                Fix(
                    command=f"ethtool {word(row.name)}; ethtool -S {word(row.name)}",
                    owner="admin",
                ),
                Fix(
                    command="# replace its cable or transceiver, or use another port of the switch",
                    owner="admin",
                ),
            ),
            impact="every step waits for it",
            unless="the counters are from long ago, the speed meant",
            confidence="likely",
        )


def _used_interface(run: Run, node: str) -> Interface | None:
    """Return the interface of the address that the job advertises."""
    facts = run.reports[node].facts.interfaces
    address = run.gloo_address(node)
    if facts is not None and run.backend == "nccl" and facts.nccl:
        address = facts.nccl[0].address
    row = interface_with(facts, address) if facts is not None and address else None
    return None if row is None or row.is_loopback or row.kind else row


def _nic_faults(row: Interface) -> Iterator[str]:
    if row.duplex == "half":
        yield "runs at half duplex"
    ratio = row.num_errors / row.num_packets if row.num_packets else 0.0
    if row.num_errors >= _MIN_ERRORS and ratio > _MAX_ERROR_RATIO:
        yield f"has {row.num_errors} errors in {row.num_packets} packets since boot"
    if row.carrier_changes > _MAX_CARRIER_CHANGES:
        yield f"lost or found its link {row.carrier_changes} times since boot"


_MAX_RATIO = 0.8  # other hosts of the subnet need room, too


class NetNeigh(BuiltinCheck, id="net.neigh", needs=("peers",)):
    """The kernel's table of neighbours (gc_thresh3) holds all nodes of the subnet."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn where the nodes on the own subnet fill more than 80 % of the table."""
        yield from self.not_measured(run, "interfaces")
        addresses = [ipaddress.ip_address(a) for n in run.expected if (a := run.gloo_address(n))]
        count = functools.cache(lambda network: sum(a in network for a in addresses))
        full: dict[tuple[int, int], list[str]] = {}
        unread = []
        for node, facts in run.each(lambda facts: facts.interfaces).items():
            row = interface_with(facts, run.gloo_address(node))
            if row is None:
                continue
            if not facts.gc_thresh3:
                unread.append(node)
                continue
            # of one family each: gloo advertises one address
            own = {ipaddress.ip_interface(text).network for text in row.addresses}
            neighbours = sum(count(network) for network in own) - 1
            if neighbours > _MAX_RATIO * facts.gc_thresh3:
                full.setdefault((neighbours, facts.gc_thresh3), []).append(node)
        title = "gc_thresh3 cannot be read in this network namespace"
        yield from self.note("skipped", unread, title)
        for (neighbours, room), nodes in full.items():
            wanted = 1 << (4 * neighbours - 1).bit_length()
            command = f"sudo sysctl -w net.ipv4.neigh.default.gc_thresh3={wanted} "
            command += f"net.ipv4.neigh.default.gc_thresh2={wanted // 2}"
            yield self.warn(
                f"room for {room} neighbours, {neighbours} nodes nearby",
                at=nodes,
                evidence={"gc_thresh3": room, "num_neighbours": neighbours},
                fix=(Fix(command=command, owner="admin"),),
                impact="'neighbour table overflow' in the kernel log; connections fail by chance",
                unless="there is a router between the nodes",
            )
