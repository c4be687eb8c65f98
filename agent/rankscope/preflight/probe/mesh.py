"""The mesh: links between agents over which reports travel, each report once over each link.

Our own changes go out at once. What others said is passed on only after a pause and only to those
who still lack it, so that in a healthy mesh nothing is sent twice. A link with nothing to say sends
an empty frame each second: a peer that is gone closes its links, one that is stopped falls silent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from rankscope.preflight.exchange.reports import Exchange
from rankscope.preflight.model import NodeReport
from rankscope.preflight.probe import wire
from rankscope.preflight.probe.dial import DialCall

RELAY_PAUSE_S = 0.4
STALE_S = 3.0  # after that, even what the peer should have heard from its author is passed on
SEND_LIMIT_S = 5.0  # a peer that stops reading must not hold us
BEAT_S = 1.0  # of a link with nothing to say
SILENT_S = 6.0  # a loaded machine delays a process by 2 s at most (16 agents on 2 cores)
_LOOK_S = 0.5


class Gossip(msgspec.Struct, frozen=True):
    """One frame: the versions that the sender has, and reports that the receiver lacks."""

    have: dict[str, int]
    reports: list[NodeReport] = []


class Mesh:
    """All links of this node."""

    def __init__(self, exchange: Exchange, on_silence: Callable[[str, str], None]) -> None:
        """`on_silence` gets a peer and "closed", "silent", or "" where it speaks, or does again."""
        self._exchange = exchange
        self._links: set[_Link] = set()
        self._on_silence = on_silence
        self._silent: set[str] = set()
        exchange.watch(self._wake)

    def linked(self) -> set[str]:
        """Return the peers to which a link is open."""
        return {link.peer for link in self._links}

    async def watch(self) -> None:
        """Look for peers that have fallen silent, or speak again; it never ends."""
        looked_at = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            if now - looked_at > _LOOK_S + BEAT_S:  # we were held up: what came lies unread
                for link in self._links:
                    link.heard_at = now
            looked_at = now
            silent = {
                peer
                for peer in self.linked()
                if all(now - one.heard_at > SILENT_S for one in self._links if one.peer == peer)
            }
            changed, self._silent = silent ^ self._silent, silent
            for peer in changed & (silent | self.linked()):
                self._on_silence(peer, "silent" if peer in silent else "")

    async def attend(self, peer: str, stream: wire.Link) -> None:
        """Exchange reports over an open connection until it ends."""
        link = _Link(self._exchange, peer, stream)
        self._links.add(link)
        self._on_silence(peer, "")
        try:
            await link.run()
        finally:
            self._links.discard(link)
            if peer not in self.linked():
                self._on_silence(peer, "closed")
            self._exchange.wake()

    async def attend_call(self, call: DialCall) -> None:
        """The same for a connection that we opened."""
        try:
            await self.attend(call.dial.answered_by, call.link)
        finally:
            await call.close()

    def all_know(self) -> bool:
        """Return whether every linked peer has all that we have."""
        have = self._exchange.have()
        return all(
            link.theirs.get(node, -1) >= version
            for link in self._links
            for node, version in have.items()
        )

    def _wake(self) -> None:
        for link in self._links:
            link.wake.set()


class _Link:
    def __init__(self, exchange: Exchange, peer: str, stream: wire.Link) -> None:
        self._exchange, self.peer = exchange, peer
        self._stream = stream
        self.theirs: dict[str, int] = {}  # versions that the peer said it has
        self._sent: dict[str, int] = {}  # versions that we sent it, or that it has
        self._acknowledged: dict[str, int] = {}  # versions that it knows us to have
        self._relay_at = 0.0
        self._stale_at = time.monotonic() + STALE_S
        self._owes_answer = False  # the peer sent reports: it learns at once that they came
        self.heard_at = time.monotonic()
        self._beat_at = self.heard_at + BEAT_S
        self.wake = asyncio.Event()
        self.wake.set()

    async def run(self) -> None:
        """Send and receive until either ends."""
        both = [asyncio.ensure_future(self._send()), asyncio.ensure_future(self._receive())]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _send(self) -> None:
        while True:
            await self._woken()
            have, now = self._exchange.have(), time.monotonic()
            is_relay = now >= self._relay_at
            lacking = [r for r in self._exchange.newer_than(self._sent) if self._sends(r, now)]
            if is_relay:
                self._relay_at = now + RELAY_PAUSE_S
            if now >= self._stale_at:
                self._stale_at = now + STALE_S
            if not lacking and not ((is_relay or self._owes_answer) and have != self._acknowledged):
                await self._beat(now)
                continue
            self._owes_answer = False
            self._beat_at = now + BEAT_S
            self._stream.write(msgspec.json.encode(Gossip(have, lacking)))
            async with asyncio.timeout(SEND_LIMIT_S):
                await self._stream.drain()
            self._acknowledged = have
            for report in lacking:
                self._sent[report.node] = report.version

    async def _beat(self, now: float) -> None:
        if now >= self._beat_at:
            self._beat_at = now + BEAT_S
            self._stream.write(b"")
            async with asyncio.timeout(SEND_LIMIT_S):
                await self._stream.drain()

    def _sends(self, report: NodeReport, now: float) -> bool:
        """Our own report at once; that of another after a pause, unless its author is nearer."""
        if report.node == self._exchange.mine.node:
            return True
        if report.node == self.peer or now < self._relay_at:
            return False
        theirs = self._exchange.reports.get(self.peer)
        is_near = theirs is not None and report.node in theirs.heard
        return not is_near or now >= self._stale_at

    async def _woken(self) -> None:
        """Wait for news, or until it is time to pass on what others said."""
        pause_s = max(0.01, self._relay_at - time.monotonic())
        alarm = asyncio.get_running_loop().call_later(pause_s, self.wake.set)
        try:
            await self.wake.wait()
        finally:
            alarm.cancel()
        self.wake.clear()

    async def _receive(self) -> None:
        while True:
            data = await self._stream.read()
            self.heard_at = time.monotonic()
            if not data:
                continue
            said = msgspec.json.decode(data, type=Gossip)
            self.theirs = said.have
            self._owes_answer = bool(said.reports)
            for node, version in said.have.items():
                self._sent[node] = max(version, self._sent.get(node, -1))
            for report in said.reports:
                self._exchange.add(report)
            self._exchange.wake()  # wakes this link too
