"""Why no packet gets from one node to another, but for a firewall: routes, links, NAT."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rankscope.preflight.checks.base import Run
from rankscope.preflight.checks.blame import Path
from rankscope.preflight.checks.pairs import CLOSED, gloo_dials, is_loopback, owners
from rankscope.preflight.facts.edges import Dial, EdgeFacts
from rankscope.preflight.facts.interfaces import Interface
from rankscope.preflight.facts.routes import MAIN_TABLE, Neighbour, Route

FaultKind = Literal[
    "refused",  # a route that forbids: blackhole, unreachable, prohibit
    "astray",  # a route away from the network that the address is in
    "overlap",  # the network of another interface lies over that of the peer
    "none",  # no route
    "gateway",  # by a router that does not answer
    "neighbour",  # a fixed entry of the neighbour table with another MAC address
    "hops",  # packets that live for too few hops
    "silent",  # one link, and no machine answers for the address there
]
LEAST_HOPS = 16  # no way inside a data centre is longer; the default is 64
_SILENT: frozenset[str] = frozenset(("no-arp",))


@dataclass(frozen=True)
class Fault:
    """What is wrong with the way from `node` to `peer`, and the route that shows it."""

    kind: FaultKind
    node: str
    peer: str
    address: str  # of the peer: the one that was dialled
    route: Route | None = None
    near: Interface | None = None  # in whose network the address is
    neighbour: Neighbour | None = None


@dataclass(frozen=True)
class Ways:
    """The closed paths of a run, by what explains them."""

    closed: Mapping[Path, EdgeFacts]
    translated: Mapping[str, dict[str, str]]  # node: address it has not: who saw it
    behind: Mapping[str, tuple[Path, ...]]  # node behind NAT: paths to it that are closed
    elsewhere: Mapping[str, tuple[Path, ...]]  # node that advertises the wrong address
    faults: tuple[Fault, ...] = field(default_factory=tuple)

    def pairs(self, faults: tuple[Fault, ...]) -> tuple[Path, ...]:
        """Return the closed paths of these faults: a packet lost one way loses both."""
        both = ((f.node, f.peer) for f in faults), ((f.peer, f.node) for f in faults)
        paths = dict.fromkeys(path for some in both for path in some)
        return tuple(path for path in paths if path in self.closed)


def is_used(run: Run, path: Path) -> bool:
    """Return whether the job itself dials this way: NCCL dials both ways, gloo one."""
    return run.backend != "gloo" or gloo_dials(run, *path) is not False


def ways(run: Run) -> Ways:
    """Evaluate all paths on which no port of the advertised address answers."""
    closed = {
        (start, end): edge
        for start, end, edge in run.edges()
        if end in run.reports and edge.ephemeral
        and all(dial.outcome in CLOSED for dial in edge.ephemeral)
    }  # fmt: skip
    if not closed:
        return Ways({}, {}, {}, {})
    owned = owners(run)
    translated = _translated(run, owned)
    behind, elsewhere = defaultdict(list), defaultdict(list)
    faults = []
    for path, edge in closed.items():
        if _works_elsewhere(edge, path[1], owned):
            elsewhere[path[1]].append(path)
        elif path[1] in translated and not _is_reached(run, path[1]):
            behind[path[1]].append(path)
        elif (fault := _fault(run, *path, edge, owned)) is not None:
            faults.append(fault)
    return Ways(
        closed,
        translated,
        {node: tuple(paths) for node, paths in behind.items()},
        {node: tuple(paths) for node, paths in elsewhere.items()},
        tuple(faults),
    )


def _good_dials(edge: EdgeFacts) -> Iterator[Dial]:
    for dial in (edge.mesh, edge.master, *edge.others, *edge.ephemeral, edge.detour):
        if dial is not None and dial.outcome == "ok":
            yield dial


def _translated(run: Run, owned: Mapping[str, frozenset[str]]) -> dict[str, dict[str, str]]:
    """Return the nodes that others see under addresses which they do not have.

    A caller is known by what the far end says that it saw, an answerer by the address that was
    dialled.
    """
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for start, end, edge in run.edges():
        for dial in _good_dials(edge):
            seen = ((start, dial.seen_address, end), (end, dial.address, start))
            for node, address, by in seen:
                if _is_foreign(run, node, address, owned):
                    found[node].setdefault(address, by)
    return found


def _is_foreign(run: Run, node: str, address: str, owned: Mapping[str, frozenset[str]]) -> bool:
    report = run.reports.get(node)
    if report is None or not report.addresses or not address or is_loopback(address):
        return False
    try:
        plain = str(ipaddress.ip_address(address.partition("%")[0]))
    except ValueError:
        return False
    return node not in owned.get(plain, frozenset()) and not plain.startswith("fe80:")


def _works_elsewhere(edge: EdgeFacts, end: str, owned: Mapping[str, frozenset[str]]) -> bool:
    """Return whether random ports answer at another address that the peer has."""
    detour = edge.detour
    return detour is not None and detour.outcome == "ok" and end in owned.get(detour.address, ())


def _is_reached(run: Run, node: str) -> bool:
    """Return whether some node reaches what this one advertises."""
    own = run.gloo_address(node)
    edges = (report.edges.get(node) for report in run.present)
    return any(
        dial.outcome == "ok" and dial.address == own
        for edge in edges
        if edge is not None
        for dial in edge.ephemeral
    )


def _fault(
    run: Run, start: str, end: str, edge: EdgeFacts, owned: Mapping[str, frozenset[str]]
) -> Fault | None:
    """Return what is wrong with the routes of `start` to `end`; None if they are as they should."""
    address = edge.ephemeral[0].address
    if owned.get(address, frozenset()) != {end}:
        return None  # a wrong name, or one address twice
    near = near_interface(run, start, address)
    for route in edge.routes:
        kind = _route_fault(run, start, edge, route, near)
        if kind is not None:
            neighbour = _neighbour(edge, route)
            return Fault(kind, start, end, address, route, near, neighbour)
    return _link_fault(run, (start, end), edge, address, near)


def _route_fault(
    run: Run, start: str, edge: EdgeFacts, route: Route, near: Interface | None
) -> FaultKind | None:
    if route.kind == "none":
        return "none"
    if route.kind in ("blackhole", "unreachable", "prohibit"):
        return "refused"
    if route.kind != "unicast" or (edge.mesh is not None and edge.mesh.outcome == "ok"):
        return None  # the host is reached: some ports are closed
    if near is not None and (route.gateway or route.interface != near.name):
        return "overlap" if _is_own_network(run, start, route) else "astray"
    if _hops(run, start) and route.gateway:
        return "hops"
    is_dead = route.gateway and edge.ephemeral[0].outcome in _SILENT
    return "gateway" if is_dead else None


def _link_fault(
    run: Run, path: Path, edge: EdgeFacts, address: str, near: Interface | None
) -> Fault | None:
    """Return what is wrong on a link that both are on."""
    if near is None:
        return None
    is_silent = all(dial.outcome in _SILENT for dial in edge.ephemeral)
    if not edge.routes:  # not asked in time: what its kernel said of ARP is known all the same
        return Fault("silent", *path, address, None, near) if is_silent else None
    for neighbour in edge.neighbours:
        if neighbour.state == "permanent" and neighbour.address == address:
            macs = {row.mac for row in interfaces_of(run, path[1]) if row.mac}
            if macs and neighbour.mac not in macs:
                return Fault("neighbour", *path, address, edge.routes[0], near, neighbour)
    has_failed = any(one.state == "failed" for one in edge.neighbours if one.address == address)
    if has_failed or is_silent:
        return Fault("silent", *path, address, edge.routes[0], near)
    return None


def _neighbour(edge: EdgeFacts, route: Route) -> Neighbour | None:
    hop = route.gateway or route.address
    return next((one for one in edge.neighbours if one.address == hop), None)


def _hops(run: Run, node: str) -> int:
    facts = run.reports[node].facts.interfaces
    limit = facts.hop_limit if facts is not None else 0
    return limit if 0 < limit < LEAST_HOPS else 0


def interfaces_of(run: Run, node: str) -> tuple[Interface, ...]:
    """Return the interfaces of a node."""
    report = run.reports.get(node)
    facts = report.facts.interfaces if report is not None else None
    return facts.interfaces if facts is not None else ()


def near_interface(run: Run, node: str, address: str) -> Interface | None:
    """Return the interface in whose network an address is: that of gloo's address before others."""
    own = run.gloo_address(node)
    rows = [
        row
        for row in interfaces_of(run, node)
        if row.is_up and not row.is_loopback
        and any(network_contains(text, address) for text in row.addresses)
    ]  # fmt: skip
    rows.sort(key=lambda row: (own not in [t.partition("/")[0] for t in row.addresses], row.kind))
    return rows[0] if rows else None


def network_contains(text: str, address: str) -> bool:
    """Return whether "10.0.0.5/24" has an address in its network."""
    network = ipaddress.ip_interface(text).network
    return network.num_addresses > 1 and ipaddress.ip_address(address) in network


def _is_own_network(run: Run, node: str, route: Route) -> bool:
    """Return whether a route is there because an interface has an address in that network."""
    return route.table == MAIN_TABLE and not route.gateway and any(
        row.name == route.interface and str(ipaddress.ip_interface(text).network) == route.prefix
        for row in interfaces_of(run, node)
        for text in row.addresses
    )  # fmt: skip
