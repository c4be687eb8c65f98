"""Established TCP connections of this network namespace, as the kernel itself counts them.

One dump of NETLINK_SOCK_DIAG lists all sockets at once and needs no rights: sock_diag(7). The
layouts are those of `struct inet_diag_req_v2`, `inet_diag_msg` (linux/inet_diag.h) and `tcp_info`
(linux/tcp.h). What an older kernel does not have is missing at the end, and is -1 here.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Collection, Iterator
from typing import NamedTuple, TypeAlias

_SOCK_DIAG = 4  # NETLINK_SOCK_DIAG; this and the next are not in Python's `socket`
_BY_FAMILY = 20  # SOCK_DIAG_BY_FAMILY
_REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_ERROR, _DONE = 2, 3
_INFO, _CONTROL, _MEMORY = 2, 4, 7  # INET_DIAG_INFO, _CONG, _SKMEMINFO
_WANTED = 1 << (_INFO - 1) | 1 << (_CONTROL - 1) | 1 << (_MEMORY - 1)
_ESTABLISHED = 1 << 1
_TIMEOUT_SECONDS = 2.0
_RECEIVE_BYTES = 1 << 18

_HEAD = struct.Struct("=IHHII")  # nlmsghdr
_REQUEST = struct.Struct("=BBBxI48x")
_SOCKET = struct.Struct("=B3x2s2s16s16s28xI")  # inet_diag_msg
_ATTRIBUTE = struct.Struct("=HH")
_DROPS = struct.Struct("=32xI")  # SK_MEMINFO_DROPS
# Of tcp_info the fields of `Counters`, in the order in which they lie there.
_COUNTERS = struct.Struct("=4xB11xI4xI52xI16xI16xQQ8xI8xI8xQQ32xI8xI")
_NOT_REPORTED = ((1 << 32) - 1, (1 << 64) - 1)
_BEFORE_IPV4 = bytes(10) + b"\xff\xff"  # an IPv4 address within IPv6

Address: TypeAlias = tuple[bytes, bytes]  # host of 4 or 16 bytes, port; see `address_text`


class Counters(NamedTuple):
    """What the kernel counts of one end of a connection; -1 where it does not count it."""

    backoff: int
    segment_bytes: int
    in_flight_segments: int  # sent and not acknowledged
    congestion_segments: int
    retransmitted_segments: int
    acknowledged_bytes: int
    received_bytes: int
    unsent_bytes: int
    sent_segments: int  # with data; what is sent again counts again
    busy_us: int
    receiver_limited_us: int
    needless_segments: int  # sent again, had arrived: RFC 3708
    receiver_bytes: int  # window of the receiver


class TcpConnection(NamedTuple):
    """One end of a connection. Tuples, as a node may have ten thousand."""

    inode: int
    local: Address
    remote: Address
    control: str  # name of the congestion control
    drops: int  # segments that came and were thrown away at this socket; -1 not known
    counters: Counters


def address_text(address: Address) -> str:
    """Return `host:port`; an IPv4 address is written so in either family."""
    host = address[0]
    if len(host) == 4:
        return f"{socket.inet_ntop(socket.AF_INET, host)}:{port_of(address)}"
    return f"[{socket.inet_ntop(socket.AF_INET6, host)}]:{port_of(address)}"


def port_of(address: Address) -> int:
    """Return the port of an address."""
    return int.from_bytes(address[1], "big")


def established(inodes: Collection[int] | None = None) -> list[TcpConnection]:
    """Return the established connections, or those whose socket has one of these inodes.

    Raises OSError where the kernel has no such interface or refuses it.
    """
    family = getattr(socket, "AF_NETLINK", None)
    if family is None:
        raise OSError("no netlink sockets: not Linux")
    with socket.socket(family, socket.SOCK_RAW, _SOCK_DIAG) as netlink:
        netlink.settimeout(_TIMEOUT_SECONDS)
        return [
            found
            for version in (socket.AF_INET, socket.AF_INET6)
            for message in _dump(netlink, version)
            if (found := _connection(message, inodes)) is not None
        ]


def _dump(netlink: socket.socket, family: int) -> Iterator[bytes]:
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, _WANTED, _ESTABLISHED)
    netlink.send(_HEAD.pack(_HEAD.size + len(request), _BY_FAMILY, _REQUEST_DUMP, 1, 0) + request)
    while True:
        data, at = memoryview(netlink.recv(_RECEIVE_BYTES)), 0
        while at + _HEAD.size <= len(data):
            length, kind, *_ = _HEAD.unpack_from(data, at)
            if kind == _DONE:
                return
            body = bytes(data[at + _HEAD.size : at + length])
            if kind == _ERROR:
                number = -struct.unpack_from("=i", body)[0]
                raise OSError(number, "the kernel refuses to list its sockets")
            yield body
            at += max(length + 3 & ~3, _HEAD.size)


def _connection(message: bytes, inodes: Collection[int] | None) -> TcpConnection | None:
    family, local_port, remote_port, local, remote, inode = _SOCKET.unpack_from(message)
    if not inode or (inodes is not None and inode not in inodes):
        return None
    attributes = dict(_attributes(message, _SOCKET.size))
    info, memory = attributes.get(_INFO), attributes.get(_MEMORY, b"")
    if info is None:
        return None
    return TcpConnection(
        inode,
        (_host(family, local), local_port),
        (_host(family, remote), remote_port),
        attributes.get(_CONTROL, b"").rstrip(b"\0").decode(errors="replace"),
        _DROPS.unpack_from(memory)[0] if len(memory) >= _DROPS.size else -1,
        _counters(info),
    )


def _counters(info: bytes) -> Counters:
    if len(info) >= _COUNTERS.size:
        return Counters._make(_COUNTERS.unpack_from(info))
    whole = Counters._make(_COUNTERS.unpack(info.ljust(_COUNTERS.size, b"\xff")))
    return Counters._make(-1 if value in _NOT_REPORTED else value for value in whole)


def _attributes(message: bytes, at: int) -> Iterator[tuple[int, bytes]]:
    while at + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, at)
        if length < _ATTRIBUTE.size:
            return
        yield kind, message[at + _ATTRIBUTE.size : at + length]
        at += length + 3 & ~3


def _host(family: int, raw: bytes) -> bytes:
    if family == socket.AF_INET:
        return raw[:4]
    return raw[12:] if raw.startswith(_BEFORE_IPV4) else raw
