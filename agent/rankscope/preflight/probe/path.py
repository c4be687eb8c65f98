"""Latency, clock and large messages over one open connection to a peer's agent."""

from __future__ import annotations

import asyncio
import os
import struct
import time

from rankscope.preflight.facts.edges import Clock, Idle, Rtt
from rankscope.preflight.probe.dial import DialCall

NUM_PINGS = 12
PING_BYTES = 64
NUM_CLOCKS = 5
LARGE_BYTES = 64 << 10
LARGE_LIMIT_S = 2.5  # at 1 Mbit/s 64 kB there and back take 1 s; a lost one is repeated in 0.2 s
STEP_LIMIT_S = 2.0
IDLE_S = 65.0  # NAT and firewalls that forget an idle connection do so after 60 s at the earliest


async def ask(call: DialCall, data: bytes, limit_s: float = STEP_LIMIT_S) -> bytes:
    """Send a frame and return the answer. Raises OSError, EOFError, TimeoutError."""
    async with asyncio.timeout(limit_s):
        call.link.write(data)
        return await call.link.read()


async def ping(call: DialCall) -> Rtt:
    """Return the round trips of 64-byte messages. Raises OSError, EOFError, TimeoutError."""
    data, took = b"P" + bytes(PING_BYTES - 1), []
    for _ in range(NUM_PINGS):
        started = time.perf_counter()
        await ask(call, data)
        took.append((time.perf_counter() - started) * 1e3)
    took.sort()
    return Rtt(
        num=len(took), min_ms=took[0], median_ms=took[len(took) // 2],
        p95_ms=took[int(len(took) * 0.95)], max_ms=took[-1],
    )  # fmt: skip


async def clock(call: DialCall) -> Clock:
    """Return the peer's clock minus ours, from the exchange with the shortest round trip.

    Four time stamps as in NTP (RFC 5905, section 8): offset = ((t2 - t1) + (t3 - t4)) / 2.
    Raises OSError, EOFError, TimeoutError.
    """
    best: Clock | None = None
    for _ in range(NUM_CLOCKS):
        sent_s, started = time.time(), time.perf_counter()
        data = await ask(call, b"C")
        round_trip_s = time.perf_counter() - started
        back_s = sent_s + round_trip_s  # one clock for both ends of the interval
        _, there_s, answered_s = struct.unpack("!cdd", data)
        offset_ms = ((there_s - sent_s) + (answered_s - back_s)) / 2 * 1e3
        if best is None or round_trip_s * 500 < best.uncertainty_ms:
            best = Clock(offset_ms=offset_ms, uncertainty_ms=round_trip_s * 500)
    assert best is not None
    return best


async def echo_large(call: DialCall, num_bytes: int = LARGE_BYTES) -> float | None:
    """Return the ms that so many bytes need there and back; None if they do not arrive whole."""
    data = b"L" + os.urandom(num_bytes - 1)
    started = time.perf_counter()
    try:
        if await ask(call, data, LARGE_LIMIT_S) != data:
            return None
    except (OSError, EOFError, TimeoutError):
        return None
    return (time.perf_counter() - started) * 1e3


async def hold(call: DialCall, silent_s: float = IDLE_S) -> Idle:
    """Say nothing for a while, then something; return whether it still came through."""
    await asyncio.sleep(silent_s)
    try:
        await ask(call, b"P")
    except TimeoutError:
        return Idle(silent_s=silent_s, error=f"no answer in {STEP_LIMIT_S:g} s")
    except (OSError, EOFError) as error:
        return Idle(silent_s=silent_s, error=str(error) or type(error).__name__)
    return Idle(silent_s=silent_s)
