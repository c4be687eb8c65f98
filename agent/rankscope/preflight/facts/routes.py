"""The way to a peer as this node's kernel sees it: the route, and the neighbour it leads to."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from typing import Literal

import msgspec

from rankscope.preflight.facts import netlink

RouteKind = Literal["unicast", "local", "blackhole", "unreachable", "prohibit", "throw", "none"]
MAIN_TABLE = 254
_KINDS: dict[int, RouteKind] = {
    1: "unicast", 2: "local", 6: "blackhole", 7: "unreachable", 8: "prohibit", 9: "throw",
}  # fmt: skip
_PERMANENT, _FAILED = 0x80, 0x20  # linux/neighbour.h
_STATES = {0x01: "incomplete", _FAILED: "failed", _PERMANENT: "permanent"}


class Route(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The route that the kernel takes to an address."""

    address: str
    kind: RouteKind = "unicast"  # none: no route at all
    source: str = ""  # asked for packets with this address of ours; "": the kernel chooses
    prefix: str = ""  # "10.77.0.3/32", "0.0.0.0/0"
    gateway: str = ""  # "": the address is on the link itself
    interface: str = ""
    table: int = MAIN_TABLE
    error: str = ""  # errno of a lookup that found none: "ENETUNREACH"


class Neighbour(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The entry of the neighbour table for the next hop."""

    address: str
    interface: str
    mac: str = ""  # "02:00:00:00:00:01"; "": no answer
    state: str = ""  # permanent, failed, incomplete; "": any other


def towards(address: str, own: str) -> tuple[Route, ...]:
    """Return the route to `address`, and that of packets from `own` where it is another one.

    A rule for a source address (`ip rule add from`) counts for answers, and for each call once its
    own address is chosen. Empty where this kernel cannot be asked.
    """
    if not _is_address(address):
        return ()
    found = [_route(address, "")]
    if _is_address(own):
        found.append(_route(address, own))
    routes = [route for route in found if route is not None]
    if len(routes) == 2 and routes[0] == msgspec.structs.replace(routes[1], source=""):
        return (routes[0],)
    return tuple(routes)


def next_hops(routes: tuple[Route, ...]) -> tuple[Neighbour, ...]:
    """Return what the neighbour table says of the next hops of some routes."""
    hops = {
        (route.gateway or route.address, route.interface)
        for route in routes
        if route.kind == "unicast" and route.interface
    }
    found = []
    for hop, interface in sorted(hops):
        with contextlib.suppress(OSError, ValueError, StopIteration):
            entry = netlink.neighbour_of(hop, socket.if_nametoindex(interface))
            mac = entry.attributes.get(netlink.NEIGHBOUR_MAC, b"").hex(":")
            state = _STATES.get(entry.fixed[3], "")
            found.append(Neighbour(address=hop, interface=interface, mac=mac, state=state))
    return tuple(found)


def is_unanswered(address: str) -> bool:
    """Return whether the kernel asks, or asked in vain, which machine has the next hop there."""
    hops = next_hops(towards(address, ""))
    return any(one.state in ("failed", "incomplete") for one in hops)


def _route(address: str, own: str) -> Route | None:
    try:
        return _read(netlink.route_to(address, own), address, own)
    except (ValueError, StopIteration, TimeoutError):
        return None
    except OSError as error:
        return _refused(address, own, str(error.strerror))


# What a lookup ends with where such a route is found (net/ipv4/fib_semantics.c: fib_props).
_REFUSED: dict[str, tuple[RouteKind, ...]] = {
    "EINVAL": ("blackhole",), "EHOSTUNREACH": ("unreachable",), "EACCES": ("prohibit",),
    "ENETUNREACH": ("unreachable", "throw"),
}  # fmt: skip


def _refused(address: str, own: str, error: str) -> Route | None:
    """Return the route that forbids an address, or that there is none."""
    if error not in _REFUSED:
        return None  # another trouble than a route
    target, best = ipaddress.ip_address(address), None
    with contextlib.suppress(OSError):
        for message in netlink.all_routes(target.version):
            route = _read(message, address, own)
            is_of_kind = route.kind in _REFUSED[error] and route.kind != "throw"
            if is_of_kind and target in ipaddress.ip_network(route.prefix):
                best = route if best is None or _length(route) >= _length(best) else best
    if best is not None:
        return msgspec.structs.replace(best, error=error)
    return Route(address=address, kind="none", source=own, error=error)


def _length(route: Route) -> int:
    return int(route.prefix.partition("/")[2] or 0)


def _read(message: netlink.Message, address: str, own: str) -> Route:
    version = 4 if message.fixed[0] == socket.AF_INET else 6
    nowhere = "0.0.0.0" if version == 4 else "::"
    prefix = f"{message.address(netlink.DST) or nowhere}/{message.fixed[1]}"
    table = message.number(netlink.TABLE) or message.fixed[4]
    interface = ""
    with contextlib.suppress(OSError):
        index = message.number(netlink.OIF)
        interface = socket.if_indextoname(index) if index else ""
    return Route(
        address=address, source=own, prefix=prefix, table=table, interface=interface,
        kind=_KINDS.get(message.fixed[7], "unicast"),
        gateway=message.address(netlink.GATEWAY) or _via(message),
    )  # fmt: skip


def _via(message: netlink.Message) -> str:
    """Return a gateway of the other address family (RTA_VIA)."""
    data = message.attributes.get(netlink.VIA, b"")[2:]
    return str(ipaddress.ip_address(data)) if len(data) in (4, 16) else ""


def _is_address(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_link_local or address.is_unspecified)
