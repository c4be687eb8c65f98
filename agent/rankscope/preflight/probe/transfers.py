"""Bandwidth in rounds: a node is in one transfer at a time, in both directions after each other.

There is no barrier between the rounds. A node that calls while the other side is in a transfer is
answered so and calls again; as all nodes work off the same list of rounds in order, some transfer
is always under way.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence

from rankscope.preflight.facts.edges import Bandwidth, Dial
from rankscope.preflight.probe import bulk
from rankscope.preflight.probe.dial import Caller, dial
from rankscope.preflight.probe.listener import Listener
from rankscope.preflight.probe.wire import Op

PAIR_LIMIT_S = 6.0  # waiting for the partner included
BUSY_PAUSE_S = 0.015
_BOTH_WAYS: tuple[Op, ...] = ("send", "fetch")
Pair = tuple[str, str]


class Transfers:
    """This node's part in the rounds. In each pair the first one drives."""

    def __init__(self, caller: Caller, listener: Listener) -> None:
        self._caller, self._listener = caller, listener
        self._first: dict[str, int] = {}  # transfers of the first look, once there is a second

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

    async def run_again(
        self, rounds: Sequence[Sequence[Pair]], door: Callable[[str], Dial | None]
    ) -> None:
        """Measure slow pairs once more; `bandwidth` then names the second figure as such."""
        self._first = {peer: len(self._all(peer)) for peer in self.peers()}
        await self.run(rounds, door, 1)

    def bandwidth(self, peer: str) -> Bandwidth | None:
        """Return what was measured towards `peer`, whichever side drove."""
        found = self._all(peer)
        first = self._first.get(peer, len(found))
        if not found[:first]:
            return None
        rates = tuple(one.mbit_per_s for one in found)
        return Bandwidth(
            mbit_per_s=max(rates[:first]), rounds=rates,
            num_segments=sum(one.num_segments for one in found),
            num_retransmits=sum(one.num_retransmits for one in found),
            again_mbit_per_s=max(rates[first:], default=-1.0),
            waited_ratio=min(one.waited_ratio for one in found),
        )  # fmt: skip

    def peers(self) -> set[str]:
        """Return those with whom there was a transfer."""
        return set(self._listener.counted)

    def _all(self, peer: str) -> list[bulk.Received]:
        return self._listener.counted.get(peer, [])

    async def _pair(self, peer: str, where: Dial) -> None:
        """One transfer in each direction, as soon as both nodes are free for it."""
        deadline = time.monotonic() + PAIR_LIMIT_S
        for op in _BOTH_WAYS:
            while time.monotonic() < deadline:
                async with self._listener.exclusive:
                    if await self._transfer(peer, where, op):
                        break
                await asyncio.sleep(BUSY_PAUSE_S * (0.5 + random.random()))

    async def _transfer(self, peer: str, where: Dial, op: Op) -> bool:
        """Send or fetch; return False while the peer is in another transfer."""
        _, call = await dial(self._caller, where.address, where.port, peer, op)
        if call is None:
            return True  # the path failed meanwhile: others report that
        try:
            if call.is_busy:
                return False
            if op == "send":
                sent = await bulk.send(call.link)
                self._listener.counted.setdefault(peer, []).append(sent)
            else:
                await bulk.receive(call.link)
        except (OSError, EOFError, TimeoutError, ValueError):
            pass  # no figure is no verdict
        finally:
            await call.close()
        return True
