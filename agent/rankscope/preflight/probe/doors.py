"""Random ports of a peer: enough of them, each with data both ways, and again before one counts.

A firewall may close a part of the range, a proxy may accept what it then drops, and a rule that
limits new connections looks like a hole until it is asked again at leisure.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rankscope.preflight.facts.edges import NUM_FLOWS, Dial, DialClass
from rankscope.preflight.probe.dial import (
    PROVEN_LIMIT_S,
    SMALL_SEGMENT_BYTES,
    Caller,
    DialCall,
    class_of,
    dial,
)
from rankscope.preflight.probe.path import ask

NUM_PORTS = 24  # of a node, evenly over its range: a hole of a 24th of it holds one of them
MOST_DIALS = 96  # of one node to all its peers; each costs it and the peer 1 ms of a core
LEAST_DIALS = 3  # to each peer
DATA_BYTES = 4096
# A filter that reads along lets some packets pass before it decides. Segments that are sent at once
# may be one to it (GSO); what waits for an answer is not. A turn costs 25 us of either end.
NUM_TURNS, TURN_BYTES = 8, 64
DATA_LIMIT_S = 4.0  # as for the first answer: an agent on a busy machine takes its time
AGAIN_AFTER_S = 1.2  # a dial that is silent so long gets company: two lost packets are no proof
AGAIN_PAUSE_S = 0.3
AGAIN_LIMIT_S = 2.3  # of a port that was closed before: one SYN and its repetition, twice
SPACING_S = 0.012  # between two dials of one path: 24 new connections at once look like a flood
GENTLE_S, SLOW_S = 0.06, 0.3  # the same of later rounds
MOST_SLOW = 6
PROBE_LIMIT_S = 1.2  # one SYN and its repetition
NUM_PROBES = 12  # ports without a listener, on either side of a hole
# Connections that are hashed to one of several links, of which one is dead, vanish for good.
LEAST_RESCUED = 2  # dials of which only the repetition came through: reason enough to look
FLOW_SPACING_S = 0.15  # a dead link of four is missed once in 100 times
FLOW_LIMIT_S = 3.4  # SYNs after 0, 1 and 3 s
NUM_KEPT = 3  # good dials that are reported whole; of the others only the port
_FILES_BESIDE = 48  # descriptors that an agent needs for anything else
_MOST_OPEN = 256  # attempts at a time
BY_FILTER: frozenset[DialClass] = frozenset(("drop", "prohibited"))  # no kernel does that itself
STRANGE: frozenset[DialClass] = frozenset(("no-data", "not-us", "wrong-host", "other-secret"))


def most_ports() -> int:
    """Return how many ports this process may listen on, and dial, without running out of files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return NUM_PORTS
    return max(LEAST_DIALS, min(NUM_PORTS, (soft - _FILES_BESIDE) // 8))


def spread(low: int, high: int, num: int, start: float) -> list[range]:
    """Return `num` equal parts of low..high, each beginning with the port to be tried first.

    `start` (0 to 1) is the place of that port in its part: the ports are equally far apart, so
    that no hole as wide as a part lies between them.
    """
    size = high - low + 1
    num = max(1, min(num, size))
    parts = []
    for number in range(num):
        first, end = low + size * number // num, low + size * (number + 1) // num
        chosen = first + int((end - first) * start)
        parts.append(range(chosen, end) if chosen < end else range(first, end))
    return parts


def chosen(ports: Sequence[int], place: int, num_peers: int) -> tuple[int, ...]:
    """Return which of a peer's ports the node at `place` dials; together all are dialled."""
    wanted = max(LEAST_DIALS, MOST_DIALS // max(num_peers, 1))
    step = max(1, -(-len(ports) // wanted))
    return tuple(ports[place % step :: step])


@dataclass(frozen=True)
class House:
    """What is known of a peer's ports."""

    peer: str
    address: str
    ports: tuple[int, ...] = ()  # to be dialled; its agent says that it listens there
    decoy: int = 0  # bound and never listened on; 0: none
    low: int = 0  # the range of random ports
    high: int = 0


class Doors:
    """Dials ports for one node."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._rescued: dict[str, int] = {}  # by address
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        num = _MOST_OPEN if soft == resource.RLIM_INFINITY else (soft - _FILES_BESIDE) // 4
        self._slots = asyncio.Semaphore(max(2, min(_MOST_OPEN, num)))

    async def knock(self, house: House, port: int, limit_s: float = PROVEN_LIMIT_S) -> Dial:
        """Dial one port until it is proven open or closed, with data both ways."""
        async with self._slots:
            found, is_rescued = await _twice(
                lambda limit_s: self._once(house, port, limit_s), limit_s
            )
            self._rescued[house.address] = self._rescued.get(house.address, 0) + is_rescued
            return found

    async def ask(self, house: House, publish: Callable[..., None]) -> None:
        """Dial all ports of a house; `publish` gets fields of `EdgeFacts` once they are known."""
        dials: dict[int, Dial] = {}
        await self._round(house, house.ports, SPACING_S, dials, PROVEN_LIMIT_S)
        publish(**_fields(dials))
        again = [port for port, dial in dials.items() if dial.outcome != "ok"]
        shut: tuple[int, ...] = ()
        if 0 < len(again) < len(dials):
            shut, _ = await asyncio.gather(
                self._ends(house, dict(dials)), self._gently(house, dials, again)
            )
        outcomes = {dial.outcome for dial in dials.values()}
        if outcomes == {"ok"}:
            if self._rescued.get(house.address, 0) >= LEAST_RESCUED:
                publish(**_fields(dials, await _flows(house.address, sorted(dials))))
            elif again:
                publish(**_fields(dials))
            return
        decoy = (
            await touch(house.address, house.decoy) if house.decoy and outcomes & STRANGE else ""
        )
        publish(**_fields(dials), ephemeral_shut=shut, decoy=decoy)

    async def confirm(self, peer: str, silent: Sequence[Dial]) -> dict[Dial, Dial]:
        """Dial the first of some silent ports anew; return what became of each."""
        again: dict[Dial, Dial] = {}

        async def one(number: int, before: Dial) -> None:
            await asyncio.sleep(number * GENTLE_S)
            with contextlib.suppress(OSError):
                house = House(peer, before.address)
                again[before] = await self.knock(house, before.port, AGAIN_LIMIT_S)

        await asyncio.gather(*(one(*item) for item in enumerate(silent[:MOST_SLOW])))
        return again

    async def _round(
        self, house: House, ports: Iterable[int], spacing_s: float, dials: dict[int, Dial],
        limit_s: float = AGAIN_LIMIT_S,
    ) -> None:  # fmt: skip
        async def one(number: int, port: int) -> None:
            await asyncio.sleep(number * spacing_s)
            with contextlib.suppress(OSError):  # out of files: that says nothing of the port
                dials[port] = await self.knock(house, port, limit_s)

        await asyncio.gather(*(one(*item) for item in enumerate(ports)))

    async def _gently(self, house: House, dials: dict[int, Dial], again: Sequence[int]) -> None:
        """Dial closed ports anew and apart: a limit of new connections lets them pass then."""
        await self._round(house, again, GENTLE_S, dials)
        left = [port for port in again if dials[port].outcome != "ok"]
        if not left or len(left) == len(again):
            return
        asked = left[:MOST_SLOW]  # some came back: it is the pace
        await self._round(house, asked, SLOW_S, dials)
        if all(dials[port].outcome == "ok" for port in asked):
            for port in left[MOST_SLOW:]:
                del dials[port]

    async def _ends(self, house: House, dials: Mapping[int, Dial]) -> tuple[int, ...]:
        """Return closed ports at the ends of a hole, where no process listens.

        A kernel refuses them at once. Where a firewall refuses, too, they say nothing.
        """
        ports = [
            port
            for low, high in _around(dials, house.low, house.high)
            for port in _between(low, high)
        ]
        found = await asyncio.gather(*(touch(house.address, port) for port in ports))
        return tuple(port for port, how in zip(ports, found, strict=True) if how in BY_FILTER)

    async def _once(self, house: House, port: int, limit_s: float) -> Dial:
        found, call = await dial(
            self._caller, house.address, port, house.peer, "path", limit_s, SMALL_SEGMENT_BYTES
        )
        if call is None:
            return found
        try:
            how = await _carry(call)
        finally:
            await call.close()
        return msgspec.structs.replace(found, outcome="no-data", errno=how) if how else found


def is_silent(dial: Dial) -> bool:
    """Return whether a connection was accepted, and then nothing came, not even its end."""
    return (dial.outcome, dial.errno) == ("no-data", "ETIMEDOUT")


async def _carry(call: DialCall) -> str:
    """Send data there and back, then a little in turns; return what went wrong, "" if nothing."""
    data = b"L" + os.urandom(DATA_BYTES - 1)
    try:
        for some in (data, *[data[:TURN_BYTES]] * NUM_TURNS):
            if await ask(call, some, DATA_LIMIT_S) != some:
                return "EBADMSG"
        return ""
    except TimeoutError:
        return "ETIMEDOUT"
    except EOFError:
        return "EOF"
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, type(error).__name__)
    except ValueError:
        return "EBADMSG"


async def _twice(
    once: Callable[[float], Coroutine[Any, Any, Dial]], limit_s: float
) -> tuple[Dial, bool]:
    """Dial, and once more where nothing came for a while; what gets through counts.

    Also return whether it was the second dial alone that did.
    """
    started = time.monotonic()
    tries = [asyncio.ensure_future(once(limit_s))]
    try:
        await asyncio.wait(tries, timeout=AGAIN_AFTER_S)
        if not tries[0].done() or tries[0].result().outcome != "ok":
            if tries[0].done():
                await asyncio.sleep(AGAIN_PAUSE_S)
            left_s = max(AGAIN_AFTER_S, limit_s - (time.monotonic() - started))
            tries.append(asyncio.ensure_future(once(left_s)))
        for done in asyncio.as_completed(tries):
            found = await done
            if found.outcome == "ok":
                is_first = tries[0].done() and tries[0].result().outcome == "ok"
                return found, not is_first
        return tries[0].result(), False
    finally:
        for one in tries:
            one.cancel()
        await asyncio.gather(*tries, return_exceptions=True)


async def _flows(address: str, ports: Sequence[int]) -> tuple[Dial, ...]:
    """Open connections to open ports, slowly and each once; return those that vanish."""

    async def one(number: int) -> Dial:
        await asyncio.sleep(number * FLOW_SPACING_S)
        port = ports[number % len(ports)]
        how = await touch(address, port, FLOW_LIMIT_S)
        return Dial(
            outcome=how, address=address, port=port, elapsed_ms=FLOW_LIMIT_S * 1e3,
            errno="ETIMEDOUT", is_flow=True,
        )  # fmt: skip

    dials = await asyncio.gather(*map(one, range(NUM_FLOWS)))
    return tuple(dial for dial in dials if dial.outcome == "drop")


async def touch(address: str, port: int, limit_s: float = PROBE_LIMIT_S) -> DialClass:
    """Connect without a word, and return how it went; "ok": accepted, by whomever."""
    started = time.monotonic()
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
        sock.setblocking(False)
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.get_running_loop().sock_connect(sock, (address, port))
        except TimeoutError:
            return "drop"
        except OSError as error:
            return class_of(error.errno, (time.monotonic() - started) * 1e3, address)
    return "ok"


def _fields(dials: Mapping[int, Dial], vanished: tuple[Dial, ...] = ()) -> dict[str, Any]:
    """Return what is reported of all dials: those that failed, some others, and further ports."""
    in_order = [dials[port] for port in sorted(dials)]
    good = [dial for dial in in_order if dial.outcome == "ok"]
    bad = [dial for dial in in_order if dial.outcome != "ok"]
    return {
        "ephemeral": (*vanished, *bad, *good[:NUM_KEPT]),
        "ephemeral_ok": tuple(dial.port for dial in good[NUM_KEPT:]),
    }


def _around(dials: Mapping[int, Dial], low: int, high: int) -> list[tuple[int, int]]:
    """Return the ports between which the hole of a path begins and ends; none if it has not one."""
    bad = [port for port, dial in dials.items() if dial.outcome != "ok"]
    good = [port for port, dial in dials.items() if dial.outcome == "ok"]
    first, last = min(bad), max(bad)
    is_filter = all(dials[port].outcome in BY_FILTER for port in bad)
    if not is_filter or any(first < port < last for port in good):
        return []
    below = max((port for port in good if port < first), default=max(low, 1) - 1)
    above = min((port for port in good if port > last), default=max(high, last) + 1)
    return [(below, first), (last, above)]


def _between(low: int, high: int) -> list[int]:
    """Return ports between two others, which are left out, evenly."""
    num = min(NUM_PROBES, high - low - 1)
    return [low + (high - low) * (number + 1) // (num + 1) for number in range(num)]
