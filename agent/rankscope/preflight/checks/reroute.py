"""What mends a way that is wrong: the route to remove or to add, or what a person must look at."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator
from typing import TypeVar

from rankscope.preflight.checks.base import Run, listed
from rankscope.preflight.checks.commands import word
from rankscope.preflight.checks.ways import Fault, FaultKind, interfaces_of
from rankscope.preflight.facts.interfaces import Interface
from rankscope.preflight.facts.routes import MAIN_TABLE, Route
from rankscope.preflight.model import Fix

Item = TypeVar("Item")
MAX_ROUTES = 8  # in one command


def route_text(route: Route | None) -> str:
    """Return a route as `ip route` writes it."""
    if route is None:
        return "unknown"
    if route.kind == "none":
        return f"none ({route.error})"
    return " ".join(_words(route))


def _words(route: Route) -> Iterator[str]:
    if route.kind != "unicast":
        yield route.kind
    yield "default" if route.prefix.endswith("/0") else word(route.prefix)
    if route.gateway:
        yield from ("via", word(route.gateway))
    if route.interface:
        yield from ("dev", word(route.interface))
    if route.table != MAIN_TABLE:
        yield from ("table", str(route.table))


def _ip(address: str) -> str:
    return "sudo ip -6 route" if ":" in address else "sudo ip route"


def _is_exact(fault: Fault) -> bool:
    route = fault.route
    return route is not None and route.prefix == _host(fault.address)


def _host(address: str) -> str:
    return f"{address}/{ipaddress.ip_address(address).max_prefixlen}"


def _remove(run: Run, node: str, faults: list[Fault]) -> Iterator[Fix]:
    """Yield the removal of routes for one peer, and a way around wider ones."""
    exact = [fault for fault in faults if _is_exact(fault) and fault.route is not None]
    for some in _parts(exact):
        command = " && ".join(
            f"{_ip(f.address)} del {' '.join(_words(f.route))}" for f in some if f.route is not None
        )
        yield Fix(node=node, command=command, owner="admin")
    wide = [fault for fault in faults if fault not in exact]
    yield from _around(node, [fault for fault in wide if fault.near is not None])
    far = [fault for fault in wide if fault.near is None]
    for text in dict.fromkeys(route_text(fault.route) for fault in far):
        yield Fix(
            node=node,
            command=f"# remove the route {text}, or add one to {far[0].address} that is narrower, "
            "by the router that leads there",
            owner="admin",
        )


def _around(node: str, faults: list[Fault]) -> Iterator[Fix]:
    """Yield routes on the link itself, in the table that was asked: those win over wider ones."""
    commands: dict[str, None] = {}
    for fault in faults:
        assert fault.near is not None
        assert fault.route is not None
        table = f" table {fault.route.table}" if fault.route.table != MAIN_TABLE else ""
        prefix = _linked(fault)
        commands[f"{_ip(fault.address)} replace {prefix} dev {word(fault.near.name)}{table}"] = None
    for some in _parts(list(commands)):
        yield Fix(node=node, command=" && ".join(some), owner="admin")


def _linked(fault: Fault) -> str:
    """Return the network of the link where it is narrower than the route, else the host."""
    assert fault.near is not None
    assert fault.route is not None
    digits = fault.route.prefix.partition("/")[2]
    length = int(digits) if digits.isdigit() else 0
    for text in fault.near.addresses:
        network = ipaddress.ip_interface(text).network
        if ipaddress.ip_address(fault.address) in network and network.prefixlen > length:
            return str(network)
    return _host(fault.address)


def _parts(items: list[Item]) -> Iterator[list[Item]]:
    for start in range(0, len(items), MAX_ROUTES):
        yield items[start : start + MAX_ROUTES]


def _add(run: Run, node: str, faults: list[Fault]) -> Iterator[Fix]:
    """Yield the sentence for a route that is missing: the router is not known here."""
    networks = dict.fromkeys(_network(run, fault.peer, fault.address) for fault in faults)
    own = _network(run, node, run.gloo_address(node))
    command = f"# add a route to {listed(list(networks))} by the router of {own or 'its network'}"
    yield Fix(node=node, command=f"{command} (ip route add ... via ...)", owner="admin")


def _network(run: Run, node: str, address: str) -> str:
    for row in interfaces_of(run, node):
        for text in row.addresses:
            if text.partition("/")[0] == address:
                return str(ipaddress.ip_interface(text).network)
    return address


def _router(run: Run, node: str, faults: list[Fault]) -> Iterator[Fix]:
    for gateway in dict.fromkeys(f.route.gateway for f in faults if f.route is not None):
        yield Fix(
            node=node,
            command=f"# the router {gateway} does not answer: is it up, and is it the right one?",
            owner="admin",
        )


def _forget(run: Run, node: str, faults: list[Fault]) -> Iterator[Fix]:
    for fault in faults:
        if fault.neighbour is not None:
            where = f"{word(fault.neighbour.address)} dev {word(fault.neighbour.interface)}"
            yield Fix(node=node, command=f"sudo ip neigh del {where}", owner="admin")


def _live_longer(run: Run, node: str, faults: list[Fault]) -> Iterator[Fix]:
    command = "sudo sysctl -w net.ipv4.ip_default_ttl=64"
    yield Fix(node=node, command=command, owner="admin")


def _narrow(run: Run, node: str, faults: list[Fault]) -> Iterator[Fix]:
    yield from _around(node, faults)


TITLES: dict[FaultKind, Callable[[Fault, str], str]] = {
    "refused": lambda f, peers: f"forbids packets to {peers}: {route_text(f.route)}",
    "astray": lambda f, peers: (
        f"sends packets for {peers} away from {_name(f.near)}, where "
        f"{f.address} is: {route_text(f.route)}"
    ),
    "overlap": lambda f, peers: (
        f"sends packets for {peers} to {_name_of(f.route)}, whose network "
        f"lies over that of {_name(f.near)}"
    ),
    "none": lambda f, peers: f"no route to {f.address} ({peers})",
    "gateway": lambda f, peers: (
        f"sends packets for {peers} by a router that does not answer: {route_text(f.route)}"
    ),
    "neighbour": lambda f, peers: (
        f"has a fixed neighbour entry for {f.address} ({peers}) with a MAC address that it has not"
    ),
    "hops": lambda f, peers: "sends packets that live for too few hops (ip_default_ttl)",
}
FIXES: dict[FaultKind, Callable[[Run, str, list[Fault]], Iterator[Fix]]] = {
    "refused": _remove, "astray": _remove, "overlap": _narrow, "none": _add, "gateway": _router,
    "neighbour": _forget, "hops": _live_longer,
}  # fmt: skip


def _name(row: Interface | None) -> str:
    return row.name if row is not None else "its link"


def _name_of(route: Route | None) -> str:
    return route.interface if route is not None else "another interface"
