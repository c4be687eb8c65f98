"""The path MTU: UDP datagrams that may not be cut, and TCP where UDP is closed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import socket
import struct
import sys
from collections.abc import Sequence

from rankscope.preflight.facts.edges import PathMtu
from rankscope.preflight.key import RunKey
from rankscope.preflight.probe.datagrams import Probes
from rankscope.preflight.probe.dial import Caller, dial
from rankscope.preflight.probe.path import echo_large

# Jumbo frames, InfiniBand's 4 kB, Ethernet, what PPPoE, VXLAN, GRE and WireGuard leave of it, and
# what tunnels in tunnels leave, down to what every host must take.
SIZES_BYTES = (9000, 8950, 4096, 1500, 1480, 1450, 1420, 1400, 1280, 1200, 1024, 576)
NUM_PARTS, NUM_FINER = 16, 2  # sizes between two of these, tried at once; how often
NUM_SEGMENTS = 3  # of full size, sent there and back
ROUNDS_S = (0.05, 0.15, 0.3)  # waits after each repetition: two lost datagrams are no verdict
_HEADERS = {socket.AF_INET: 20 + 8, socket.AF_INET6: 40 + 8}
_TCP_HEADERS = {socket.AF_INET: 20 + 20, socket.AF_INET6: 40 + 20}
_MTU_DISCOVER = {socket.AF_INET: (socket.IPPROTO_IP, 10), socket.AF_INET6: (41, 23)}  # linux/in.h
_PMTUDISC_PROBE = 3  # set Don't Fragment, ignore what the kernel believes
_LARGEST_PACKET_BYTES = 65535  # of IP; loopback claims one byte more
_SIOCGIFMTU = 0x8921


def interface_of(address: str) -> tuple[str, str]:
    """Return (our address, interface) of the route to `address`; empty where there is none."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((address, 9))
        except OSError:
            return "", ""
        own = str(sock.getsockname()[0])
    import psutil

    for name, rows in psutil.net_if_addrs().items():
        if any(row.address.partition("%")[0] == own for row in rows):
            return own, name
    return own, ""


def mtu_of(interface: str) -> int:
    """Return the MTU of an interface in bytes, as the kernel of this namespace says; 0 unknown."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            asked = struct.pack("16s16x", interface.encode()[:15])
            return int(struct.unpack_from("@i", fcntl.ioctl(sock, _SIOCGIFMTU, asked), 16)[0])
        except OSError:
            return 0


async def probe(key: RunKey, address: str, port: int, limit_bytes: int) -> int:
    """Return the largest packet in bytes that a peer acknowledged; 0: none (UDP is closed)."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sizes = sorted({s for s in (*SIZES_BYTES, limit_bytes) if s <= limit_bytes}, reverse=True)
    probes, headers = Probes(key), _HEADERS[family]
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        if sys.platform == "linux":
            sock.setsockopt(*_MTU_DISCOVER[family], _PMTUDISC_PROBE)
        try:
            sock.connect((address, port))
        except OSError:
            return 0
        best = await _largest(sock, probes, headers, sizes)
        for _ in range(NUM_FINER):
            above = min((size for size in sizes if size > best), default=0)
            if not best or not above:
                break
            step = max(1, (above - best) // NUM_PARTS)
            sizes = [*range(best + step, above, step), above][::-1]
            best = max(best, await _largest(sock, probes, headers, sizes[1:]))
    return best


async def _largest(sock: socket.socket, probes: Probes, headers: int, sizes: Sequence[int]) -> int:
    """Return the largest of `sizes`, which are in falling order, that was acknowledged; else 0."""
    best = 0
    for wait_s in ROUNDS_S if sizes else ():
        for size in (s for s in sizes if s > best):
            with contextlib.suppress(OSError):  # EMSGSIZE: our own interface is smaller
                sock.send(probes.probe(size, size - headers))
        best = max(best, await _acknowledged(sock, probes, headers, sizes[0], wait_s))
        if best >= sizes[0]:
            break
    return best


async def _acknowledged(
    sock: socket.socket, probes: Probes, headers: int, enough: int, wait_s: float
) -> int:
    best, loop = 0, asyncio.get_running_loop()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            while best < enough:
                try:
                    data = await loop.sock_recv(sock, 64)
                except OSError as error:
                    if error.errno != errno.ECONNREFUSED:
                        return best
                    await asyncio.sleep(0.01)
                    continue
                answer = probes.answered(data)
                if answer is not None:
                    best = max(best, answer.size_bytes + headers)
    return best


async def by_clamp(caller: Caller, address: str, port: int, to: str, limit_bytes: int) -> int:
    """Return the largest packet with which full segments pass over TCP; 0: with none of them.

    All sizes are tried at once: each that vanishes takes as long as a large message may.
    """
    headers = _TCP_HEADERS[socket.AF_INET6 if ":" in address else socket.AF_INET]

    async def passed(size: int) -> int:
        segment = size - headers
        _, call = await dial(caller, address, port, to, "path", max_segment_bytes=segment)
        if call is None:
            return 0
        took = await echo_large(call, NUM_SEGMENTS * segment)
        await call.close()
        return size if took is not None else 0

    found = await asyncio.gather(*(passed(size) for size in SIZES_BYTES if size < limit_bytes))
    return max(found, default=0)


async def measure(
    caller: Caller, address: str, ports: tuple[int, int], to: str, large_ms: float | None
) -> PathMtu:
    """Return what the path to `address` carries; `ports` are the peer's (TCP, UDP) ports."""
    _, interface = interface_of(address)
    own_bytes = mtu_of(interface) or 1500
    limit_bytes = min(own_bytes, _LARGEST_PACKET_BYTES)
    carried = await probe(caller.key, address, ports[1], limit_bytes) if ports[1] else 0
    if carried == limit_bytes:
        carried = own_bytes
    if carried or large_ms is not None:
        return PathMtu(
            carried_bytes=carried, interface_bytes=own_bytes, large_ok=large_ms is not None,
            large_ms=large_ms or 0.0,
        )  # fmt: skip
    carried = await by_clamp(caller, address, ports[0], to, own_bytes)
    return PathMtu(carried_bytes=carried, how="clamp", interface_bytes=own_bytes, large_ok=False)
