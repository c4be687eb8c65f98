"""Bandwidth of a pair: one side sends, the other counts for 0.2 s and reports what came.

The receiver ends the transfer, so that a slow path costs no more time than a fast one: what the
sender's buffers still hold is thrown away with the connection. The bytes themselves carry nothing
and prove nothing, so they have no tags, which would cost a core; the count that ends them has one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from dataclasses import dataclass

import msgspec

from rankscope.preflight.probe.pace import waited_s
from rankscope.preflight.probe.wire import Link

COUNT_S = 0.2
LIMIT_S = 2.0  # of one transfer: a path that is dead on the way must not hold the round
HANG_UP_S = 1.0  # for the sender to read the count and hang up
_BLOCK_BYTES = 256 << 10
_READ_BYTES = 1 << 20
# struct tcp_info of linux/tcp.h: 8 bytes of small fields, then words
_RETRANSMITS_AT, _SEGMENTS_AT, _INFO_BYTES = 100, 136, 192


class Count(msgspec.Struct, frozen=True, kw_only=True):
    """What the receiver reports to the sender."""

    num_bytes: int
    elapsed_s: float
    waited_ratio: float = 0.0  # part of the time in which the receiver had no core


@dataclass(frozen=True)
class Received:
    """One transfer: bandwidth as the receiver counted it, segments as the sender's kernel did."""

    mbit_per_s: float
    num_segments: int = 0
    num_retransmits: int = 0
    waited_ratio: float = 0.0  # of the sender: without a core it sends no faster on a fast path


async def receive(link: Link) -> None:
    """Count what comes for 0.2 s after the first byte, and report it to the sender."""
    reader = link.reader
    num_bytes, started, now = 0, 0.0, 0.0
    async with asyncio.timeout(LIMIT_S):
        first = await reader.read(_READ_BYTES)
    if not first:
        raise EOFError("nothing was sent")
    started = now = time.monotonic()
    waited = waited_s()
    while now - started < COUNT_S:
        try:
            async with asyncio.timeout(LIMIT_S):
                data = await reader.read(_READ_BYTES)
        except TimeoutError:
            now = time.monotonic()
            break
        if not data:
            break
        num_bytes += len(data)
        now = time.monotonic()
    elapsed_s = max(now - started, 1e-6)
    waited_ratio = (waited_s() - waited) / elapsed_s
    count = Count(num_bytes=num_bytes, elapsed_s=elapsed_s, waited_ratio=waited_ratio)
    link.write(msgspec.json.encode(count))
    await link.drain()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(HANG_UP_S):  # a reset would overtake our answer
            while await reader.read(_READ_BYTES):
                pass


async def send(link: Link) -> Received:
    """Send until the receiver reports what came. Raises EOFError, OSError, ValueError."""
    link.writer.transport.set_write_buffer_limits(high=_BLOCK_BYTES)
    info: list[tuple[int, int]] = [(0, 0)]
    started, waited = time.monotonic(), waited_s()
    counted = asyncio.ensure_future(link.read())
    flood = asyncio.ensure_future(_flood(link.writer, info))
    try:
        await asyncio.wait({counted}, timeout=2 * LIMIT_S)
        line = counted.result() if counted.done() else b""
    finally:
        for task in (counted, flood):
            task.cancel()
        await asyncio.gather(counted, flood, return_exceptions=True)
    if not line:
        raise EOFError("the receiver went away")
    segments, retransmits = info[-1]
    count = msgspec.json.decode(line, type=Count)
    waited_ratio = (waited_s() - waited) / (time.monotonic() - started)
    rate = count.num_bytes * 8e-6 / count.elapsed_s
    return Received(rate, segments, retransmits, max(waited_ratio, count.waited_ratio))


async def _flood(writer: asyncio.StreamWriter, info: list[tuple[int, int]]) -> None:
    """Write without end; keep what the kernel counted, as the receiver ends the connection."""
    block, sock = bytes(_BLOCK_BYTES), writer.get_extra_info("socket")
    while True:
        writer.write(block)
        await writer.drain()
        info[0] = _tcp_info(sock)


def _tcp_info(sock: socket.socket) -> tuple[int, int]:
    """Return (segments sent, segments sent again); zeros where the kernel does not say."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except (OSError, AttributeError):
        return 0, 0
    if len(info) < _SEGMENTS_AT + 4:
        return 0, 0
    (again,) = struct.unpack_from("@I", info, _RETRANSMITS_AT)
    (sent,) = struct.unpack_from("@I", info, _SEGMENTS_AT)
    return sent, again
