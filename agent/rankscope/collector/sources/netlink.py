"""Established TCP connections of this network namespace, as the kernel itself counts them.

One dump of NETLINK_SOCK_DIAG tells of all sockets at once and needs no rights: sock_diag(7). The
layouts are those of `struct inet_diag_req_v2`, `inet_diag_msg` (linux/inet_diag.h) and `tcp_info`
(linux/tcp.h). What an older kernel does not tell is missing at the end, and is -1 here.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass

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
_SOCKET = struct.Struct("=BBBB HH16s16s I8s 5I".replace(" ", ""))  # inet_diag_msg
_ATTRIBUTE = struct.Struct("=HH")
_DROPS_AT = 8 * 4  # SK_MEMINFO_DROPS
# of tcp_info: name -> (offset, format)
_FIELDS: dict[str, tuple[int, struct.Struct]] = {
    "backoff": (4, struct.Struct("=B")),
    "segment_bytes": (16, struct.Struct("=I")),
    "in_flight_segments": (24, struct.Struct("=I")),  # sent and not acknowledged
    "congestion_segments": (80, struct.Struct("=I")),
    "retransmitted_segments": (100, struct.Struct("=I")),
    "acknowledged_bytes": (120, struct.Struct("=Q")),
    "received_bytes": (128, struct.Struct("=Q")),
    "unsent_bytes": (144, struct.Struct("=I")),
    "sent_segments": (156, struct.Struct("=I")),  # with data; what is sent again counts again
    "busy_us": (168, struct.Struct("=Q")),
    "receiver_limited_us": (176, struct.Struct("=Q")),
    "needless_segments": (216, struct.Struct("=I")),  # sent again, had arrived: RFC 3708
    "receiver_bytes": (228, struct.Struct("=I")),  # window of the receiver
}


@dataclass(frozen=True, slots=True)
class TcpConnection:
    """One end of a connection. Addresses are `host:port`, counters those of `tcp_info`."""

    inode: int
    local: str
    remote: str
    control: str  # name of the congestion control
    drops: int  # segments that came and were thrown away at this socket; -1 not told
    counters: dict[str, int]


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


def _dump(netlink: socket.socket, family: int) -> Iterator[memoryview]:
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, _WANTED, _ESTABLISHED)
    netlink.send(_HEAD.pack(_HEAD.size + len(request), _BY_FAMILY, _REQUEST_DUMP, 1, 0) + request)
    while True:
        data, at = memoryview(netlink.recv(_RECEIVE_BYTES)), 0
        while at + _HEAD.size <= len(data):
            length, kind, *_ = _HEAD.unpack_from(data, at)
            if kind == _DONE:
                return
            body = data[at + _HEAD.size : at + length]
            if kind == _ERROR:
                number = -struct.unpack_from("=i", body)[0]
                raise OSError(number, "the kernel refuses to tell of its sockets")
            yield body
            at += max(length + 3 & ~3, _HEAD.size)


def _connection(message: memoryview, inodes: Collection[int] | None) -> TcpConnection | None:
    family, _, _, _, local_port, remote_port, local, remote, *rest = _SOCKET.unpack_from(message)
    inode = rest[-1]
    if not inode or (inodes is not None and inode not in inodes):
        return None
    told = dict(_attributes(message[_SOCKET.size :]))
    info, memory = told.get(_INFO), told.get(_MEMORY)
    if info is None:
        return None
    return TcpConnection(
        inode=inode,
        local=_address(family, local, local_port),
        remote=_address(family, remote, remote_port),
        control=bytes(told.get(_CONTROL, b"")).rstrip(b"\0").decode(errors="replace"),
        drops=-1 if memory is None or len(memory) < _DROPS_AT + 4
        else struct.unpack_from("=I", memory, _DROPS_AT)[0],
        counters={
            name: layout.unpack_from(info, at)[0] if len(info) >= at + layout.size else -1
            for name, (at, layout) in _FIELDS.items()
        },
    )  # fmt: skip


def _attributes(rest: memoryview) -> Iterator[tuple[int, memoryview]]:
    at = 0
    while at + _ATTRIBUTE.size <= len(rest):
        length, kind = _ATTRIBUTE.unpack_from(rest, at)
        if length < _ATTRIBUTE.size:
            return
        yield kind, rest[at + _ATTRIBUTE.size : at + length]
        at += length + 3 & ~3


def _address(family: int, raw: bytes, port: int) -> str:
    """Return `host:port`; an IPv4 address is written so in either family."""
    if family == socket.AF_INET6 and raw[:12] == bytes(10) + b"\xff\xff":
        family, raw = socket.AF_INET, raw[12:]
    host = socket.inet_ntop(family, raw[: 4 if family == socket.AF_INET else 16])
    if family == socket.AF_INET6:
        host = f"[{host}]"
    return f"{host}:{socket.ntohs(port)}"
