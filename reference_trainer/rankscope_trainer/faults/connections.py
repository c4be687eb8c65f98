"""The TCP connections over which this rank reaches the others, and what can be done to them.

Everything acts in the kernel, on the very sockets of the communication library, and needs no
rights: a pacing rate is the kernel's own limit for what a socket sends, and a socket filter throws
segments away as they arrive, before TCP sees them, so that the other end has to send them again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

SO_ATTACH_FILTER = 26  # these four are not in Python's `socket`; the numbers are Linux's
SO_DETACH_FILTER = 27
SO_MAX_PACING_RATE = 47
SO_MEMINFO, SK_MEMINFO_DROPS = 55, 8  # nine counters, of which this is the last
UNLIMITED = 2**32 - 1

# Instructions of the classic Berkeley packet filter: (code, jump if true, jump if false, value).
LOAD, JUMP_IF_NOT_BELOW, RETURN = 0x20, 0x35, 0x06
RANDOM_NUMBER = 0xFFFFF000 + 56
DROP = (RETURN, 0, 0, 0)
ACCEPT = (RETURN, 0, 0, 0xFFFFFFFF)


def connections(peer: int | None = None) -> list[socket.socket]:
    """Return copies of this process's established TCP sockets, without those to the store.

    A copy is another descriptor of the same socket: what is set on one holds for both. With a
    `peer`, only those whose other end is in the process of that rank, on this machine.
    """
    to_ranks = [each for each in _tcp_sockets() if not _is_to_store(each)]
    if peer is None:
        return to_ranks
    ports = _ports_of(peer)
    return [each for each in to_ranks if (each.getpeername()[1], each.getsockname()[1]) in ports]


def limit_rate(connection: socket.socket, bytes_per_second: int) -> None:
    """Let the connection send no faster; `UNLIMITED` lets it go again."""
    rate = struct.pack("I", min(max(bytes_per_second, 1), UNLIMITED))
    connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)


def lose_arriving(connection: socket.socket, share: float) -> None:
    """Throw away this share of the segments that arrive; 1 is all of them."""
    if share >= 1:
        _attach(connection, [DROP])
    else:
        border = int(share * 2**32)
        draw, compare = (LOAD, 0, 0, RANDOM_NUMBER), (JUMP_IF_NOT_BELOW, 1, 0, border)
        _attach(connection, [draw, compare, DROP, ACCEPT])


def filter_refusal() -> str:
    """Return why no filter can be attached here; empty where one can."""
    with socket.socket() as unconnected:
        try:
            _attach(unconnected, [ACCEPT])
        except OSError as error:
            return error.strerror or str(error)
    return ""


def lose_nothing(connection: socket.socket) -> None:
    """Take the filter away, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        connection.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


def lost_segments(connection: socket.socket) -> int:
    """Return how many arriving segments the kernel has thrown away since the connection was made.

    The filter does so, and the kernel itself where the process reads too slowly.
    """
    counters = connection.getsockopt(socket.SOL_SOCKET, SO_MEMINFO, 4 * (SK_MEMINFO_DROPS + 1))
    return int.from_bytes(counters[4 * SK_MEMINFO_DROPS :], sys.byteorder)


def _attach(connection: socket.socket, program: list[tuple[int, int, int, int]]) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    described = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, described)


def _tcp_sockets() -> Iterator[socket.socket]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if not str(Path("/proc/self/fd", name).readlink()).startswith("socket:"):
                continue
            copy = socket.socket(fileno=os.dup(int(name)))
            is_internet = copy.family in (socket.AF_INET, socket.AF_INET6)
            try:
                if is_internet and copy.type == socket.SOCK_STREAM and copy.getpeername():
                    yield copy
                    continue
            except OSError:
                pass
            copy.close()


def _ports_of(peer: int) -> set[tuple[int, int]]:
    """Return the own and the other port of each connection of a rank of the same launcher."""
    import psutil

    for process in psutil.Process(os.getppid()).children():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RANK") == str(peer):
                open_sockets = process.net_connections(kind="tcp")
                return {(each.laddr.port, each.raddr.port) for each in open_sockets if each.raddr}
    return set()


def _is_to_store(connection: socket.socket) -> bool:
    port = int(os.environ.get("MASTER_PORT", "0"))
    return port in (connection.getsockname()[1], connection.getpeername()[1])
