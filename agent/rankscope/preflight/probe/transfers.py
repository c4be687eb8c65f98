"""Bandwidth in rounds: a node is in one transfer at a time, in both directions after each other.

There is no barrier between the rounds. Who calls while the other side is in a transfer is told so
and calls again; as all nodes work off the same list of rounds in order, somebody always gets on.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence

from rankscope.preflight.facts.edges import Bandwidth, Dial
from rankscope.preflight.probe import bulk
from rankscope.preflight.probe.dial import Call, Caller, dial
from rankscope.preflight.probe.listener import Listener
from rankscope.preflight.probe.wire import Op

PAIR_LIMIT_S = 6.0  # waiting for the partner included
BUSY_PAUSE_S = 0.015
Pair = tuple[str, str]


class Transfers:
    """This node's part in the rounds. In each pair the first one drives."""

    def __init__(self, caller: Caller, listener: Listener) -> None:
        self._caller, self._listener = caller, listener
        self.sent: dict[str, list[bulk.Received]] = {}

    async def run(
        self, rounds: Sequence[Sequence[Pair]], door: Callable[[str], Dial | None], repeats: int
    ) -> None:
        """Drive our pairs of all rounds, in order."""
        for pairs in rounds:
            for first, second in pairs:
                where = door(second) if first == self._caller.node else None
                if where is None:
                    continue
                for _ in range(repeats):
                    await self._pair(second, where)

    def bandwidth(self, peer: str) -> Bandwidth | None:
        """Return what was measured towards `peer`, whoever drove."""
        found = [*self.sent.get(peer, []), *self._listener.fetched.get(peer, [])]
        if not found:
            return None
        rates = tuple(one.mbit_per_s for one in found)
        return Bandwidth(
            mbit_per_s=max(rates), rounds=rates,
            num_segments=sum(one.num_segments for one in found),
            num_retransmits=sum(one.num_retransmits for one in found),
        )  # fmt: skip

    async def _pair(self, peer: str, where: Dial) -> None:
        deadline = time.monotonic() + PAIR_LIMIT_S
        while time.monotonic() < deadline:
            async with self._listener.exclusive:
                is_done = await self._both_ways(peer, where)
            if is_done:
                return
            await asyncio.sleep(BUSY_PAUSE_S * (0.5 + random.random()))

    async def _both_ways(self, peer: str, where: Dial) -> bool:
        """Send and fetch; return False while the peer is in another transfer."""
        call = await self._call(peer, where, "send")
        if call is None:
            return True  # the path failed meanwhile: others report that
        try:
            if call.is_busy:
                return False
            self.sent.setdefault(peer, []).append(await bulk.send(call.reader, call.writer))
        except (OSError, EOFError, TimeoutError, ValueError):
            return True
        finally:
            await call.close()
        call = await self._call(peer, where, "fetch")
        if call is None:
            return True
        try:
            if not call.is_busy:
                await bulk.receive(call.reader, call.writer)
                await asyncio.wait_for(call.reader.read(1), bulk.LIMIT_S)
        except (OSError, EOFError, TimeoutError, ValueError):
            pass
        finally:
            await call.close()
        return True

    async def _call(self, peer: str, where: Dial, op: Op) -> Call | None:
        _, call = await dial(self._caller, where.address, where.port, peer, op)
        return call
