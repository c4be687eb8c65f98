"""Questions to the kernel's routing: by which route a packet would leave, and to which neighbour.

As `ip route get` and `ip neigh get` ask, without that program and without root. Each answer takes
some 50 us; where the kernel has no netlink (gVisor), nothing is known.
"""

from __future__ import annotations

import errno as codes
import ipaddress
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

LIMIT_S = 1.0  # the kernel answers before `send` returns
_GET_ROUTE, _NEW_ROUTE, _GET_NEIGHBOUR, _NEW_NEIGHBOUR = 26, 24, 30, 28  # linux/rtnetlink.h
_ERROR, _DONE = 2, 3
_REQUEST, _DUMP = 0x1, 0x300
_FIB_MATCH = 0x3000  # return the route itself and its table, not what was made of them
_MAX_ROUTES = 20_000  # of a dump: a router with the whole internet is no training node
_HEADER, _ROUTE, _NEIGHBOUR, _ATTRIBUTE = (
    struct.Struct("=IHHII"), struct.Struct("=BBBBBBBBI"), struct.Struct("=BxHiHBB"),
    struct.Struct("=HH"),
)  # fmt: skip
DST, SRC, OIF, GATEWAY, TABLE, VIA = 1, 2, 4, 5, 15, 18  # attributes of a route
NEIGHBOUR_DST, NEIGHBOUR_MAC = 1, 2


@dataclass(frozen=True)
class Message:
    """One answer of the kernel: its kind, its fixed part, and its attributes by number."""

    kind: int
    fixed: tuple[int, ...]
    attributes: dict[int, bytes] = field(default_factory=dict)

    def number(self, attribute: int) -> int:
        """Return an attribute as a number; 0 where it is not there."""
        data = self.attributes.get(attribute, b"")
        return int(struct.unpack("=I", data)[0]) if len(data) == 4 else 0

    def address(self, attribute: int) -> str:
        """Return an attribute as an address; "" where it is not there."""
        data = self.attributes.get(attribute, b"")
        return str(ipaddress.ip_address(data)) if len(data) in (4, 16) else ""


def route_to(address: str, source: str = "") -> Message:
    """Return the route of the kernel's tables that a packet to `address` would take.

    Raises OSError: with the kernel's errno where no route leads there (EINVAL: blackhole).
    """
    target = ipaddress.ip_address(address)
    data = [(DST, target.packed)]
    own = ipaddress.ip_address(source) if source else None
    if own is not None and own.version == target.version:
        data.append((SRC, own.packed))
    bits = target.max_prefixlen
    fixed = _ROUTE.pack(
        _family(target.version), bits, bits if len(data) > 1 else 0, 0, 0, 0, 0, 0, _FIB_MATCH
    )
    return next(iter(_ask(_GET_ROUTE, fixed, data)))


def all_routes(version: int) -> list[Message]:
    """Return all routes of all tables. Raises OSError."""
    fixed = _ROUTE.pack(_family(version), 0, 0, 0, 0, 0, 0, 0, 0)
    found = []
    for message in _ask(_GET_ROUTE, fixed, (), _DUMP):
        found.append(message)
        if len(found) >= _MAX_ROUTES:
            break
    return found


def neighbour_of(address: str, index: int) -> Message:
    """Return the entry of the neighbour table for `address`. Raises OSError (ENOENT: none)."""
    target = ipaddress.ip_address(address)
    fixed = _NEIGHBOUR.pack(_family(target.version), 0, index, 0, 0, 0)
    return next(iter(_ask(_GET_NEIGHBOUR, fixed, [(NEIGHBOUR_DST, target.packed)])))


def _family(version: int) -> int:
    return socket.AF_INET if version == 4 else socket.AF_INET6


def _ask(
    kind: int, fixed: bytes, attributes: tuple[()] | list[tuple[int, bytes]], flags: int = 0
) -> Iterator[Message]:
    """Send a request and yield its answers. Raises OSError, also where the kernel is silent."""
    body = fixed + b"".join(
        _ATTRIBUTE.pack(_ATTRIBUTE.size + len(data), number) + data for number, data in attributes
    )
    family = getattr(socket, "AF_NETLINK", None)
    if family is None:
        raise OSError(codes.EAFNOSUPPORT, "no netlink here")
    with socket.socket(family, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0) as link:
        link.settimeout(LIMIT_S)
        link.send(_HEADER.pack(_HEADER.size + len(body), kind, _REQUEST | flags, 1, 0) + body)
        while True:
            for code, data in _messages(link.recv(1 << 17)):
                if code == _ERROR:
                    number = -struct.unpack_from("=i", data)[0]
                    raise OSError(number, codes.errorcode.get(number, str(number)))
                if code == _DONE:
                    return
                yield _message(code, data)
            if not flags:
                return


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _HEADER.size:
        length, code, *_ = _HEADER.unpack_from(data)
        if length < _HEADER.size:
            return
        yield code, data[_HEADER.size : length]
        data = data[(length + 3) & ~3 :]


def _message(code: int, data: bytes) -> Message:
    shape = _ROUTE if code == _NEW_ROUTE else _NEIGHBOUR
    fixed, rest, attributes = shape.unpack_from(data), data[shape.size :], {}
    while len(rest) >= _ATTRIBUTE.size:
        length, number = _ATTRIBUTE.unpack_from(rest)
        if length < _ATTRIBUTE.size:
            break
        attributes[number] = rest[_ATTRIBUTE.size : length]
        rest = rest[(length + 3) & ~3 :]
    return Message(code, fixed, attributes)
