"""What this node measures towards its peers: who can be reached, how, and how well."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from rankscope.preflight.exchange.reports import Exchange
from rankscope.preflight.facts import routes
from rankscope.preflight.facts.edges import Dial, DialClass, EdgeFacts, PathMtu, Rtt
from rankscope.preflight.facts.ports import owner_of
from rankscope.preflight.model import STAGES, NodeReport
from rankscope.preflight.probe import loss, mtu, path, wire
from rankscope.preflight.probe.dial import (
    LIMIT_S,
    PROVEN_LIMIT_S,
    SMALL_SEGMENT_BYTES,
    Caller,
    DialCall,
    dial,
    plain,
)
from rankscope.preflight.probe.doors import Doors, House, chosen, is_silent
from rankscope.preflight.probe.mesh import Mesh
from rankscope.preflight.system import Resolved, System

MEET_PAUSE_S = 0.4  # between two calls to a peer that has not answered
# Every agent listens here too: agents that were given another MASTER_PORT than the rest must meet
# them, to hear of it.
MEETING_PORT = 29500
MAX_AT_ONCE = 128
MAX_RESOLVERS = 32
COLLECTIVE = "rankscope.preflight.collective"  # the process that has rank 0's store on MASTER_PORT
# All that is asked of one peer: below it each step has a limit of its own.
# A name (3 s), then dials at the same time (3.5 s) with their answers (4 s) and their data (4 s),
# and what failed among them more slowly (4 s).
REACH_LIMIT_S = 20.0
PATH_LIMIT_S = 12.0
STUCK_S = 10.0  # two calls of ANSWER_LIMIT_S; a process on a crowded machine answers in 2 s
# Jitter of a path is there each time; that of a busy process is not. The calmest of four counts.
CALM_MS = 2.0
NUM_CALM, CALM_PAUSE_S = 4, 0.15


@dataclass(frozen=True)
class Goal:
    """What a prober must know of the run."""

    is_named: bool  # the peers' names can be resolved; else their reported addresses are called
    master: str  # the node that holds MASTER_PORT
    master_addr: str
    master_port: int
    num_peers: int = 1  # that this node probes


_STRANGERS: frozenset[DialClass] = frozenset(("other-secret", "other-version", "wrong-host"))
_NO_ANSWER: frozenset[DialClass] = frozenset(("refused", "drop", "no-data", "error"))


class Prober:
    """Keeps the edges of one node; `on_change` is called after each new fact."""

    def __init__(
        self, system: System, caller: Caller, exchange: Exchange, mesh: Mesh,
        on_change: Callable[[], None],
    ) -> None:  # fmt: skip
        self._system, self._caller, self._exchange, self._mesh = system, caller, exchange, mesh
        self._on_change = on_change
        self._resolvers = ThreadPoolExecutor(MAX_RESOLVERS, "preflight-names")
        self._links: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)
        self._doors = Doors(caller)
        self.edges: dict[str, EdgeFacts] = {}
        self._stuck: dict[str, float] = {}  # by peer: since when its kernel alone answers

    async def meet(self, peer: str, goal: Goal) -> None:
        """Call a peer by its name until its agent answers; the link then carries reports."""
        ports = dict.fromkeys((goal.master_port, MEETING_PORT))
        for port in itertools.cycle(ports):
            started = time.monotonic()
            op: wire.Op = "hello" if peer in self._mesh.linked() else "board"
            async with self._slots:
                call = await self._call_by_name(peer, goal, op, port=port)
            if call is not None and op == "board":
                self._keep(call)
                return
            if call is not None:
                await call.close()
                return
            self._note_stuck(peer, started)
            await asyncio.sleep(max(0.0, MEET_PAUSE_S - (time.monotonic() - started)))

    def _note_stuck(self, peer: str, started: float) -> None:
        dial = self._edge(peer).mesh
        if dial is not None and is_silent(dial):
            self._stuck.setdefault(peer, started)
        else:
            self._stuck.pop(peer, None)

    def is_stuck(self, peer: str) -> bool:
        """Return whether a peer's port was open for long, and never an answer came."""
        return time.monotonic() - self._stuck.get(peer, math.inf) > STUCK_S

    async def meet_master(self, goal: Goal) -> None:
        """Call the holder of MASTER_ADDR, while no names are known; itself it need not call."""
        while True:
            resolved = await self.resolve(goal.master_addr)
            for address in resolved.addresses:
                _, call = await self._dial_board(address, goal.master_port, "", "board")
                if call is not None and call.dial.answered_by != self._caller.node:
                    self._keep(call)
                    return
                if call is not None:
                    await call.close()
                    return
            await asyncio.sleep(MEET_PAUSE_S)

    async def other_preflight(self, port: int) -> str:
        """Return what to call the preflight that holds a port of this node; "" if none does.

        Agents of one preflight may share a machine: they go by different names.
        """
        found, call = await dial(self._caller, "127.0.0.1", port, "")
        if call is not None:
            await call.close()
            is_ours = call.dial.answered_by != self._caller.node
            return "" if is_ours else "an earlier preflight"
        if found.outcome == "other-run":
            return f"the preflight {found.banner}"
        if found.outcome in ("other-secret", "other-version"):
            return "another preflight"
        loop = asyncio.get_running_loop()
        owner = await loop.run_in_executor(self._resolvers, owner_of, self._system, port)
        is_collective = owner is not None and COLLECTIVE in owner.command
        return "the collective of another preflight" if is_collective else ""

    async def reach(self, peer: str, goal: Goal) -> None:
        """Dial all ports of a peer that has reported that it listens: these dials count."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REACH_LIMIT_S), self._slots:
                await asyncio.gather(
                    self._prove(peer, goal),
                    self._ask_master(peer, goal),
                    self._ask_random(peer, goal.num_peers),
                )
                await self._explain(peer)

    async def call_again(self, peer: str) -> bool:
        """Open another link to a peer whose link was closed; return whether it is there."""
        where = self.open_door(peer)
        report = self._exchange.reports.get(peer)
        address = where.address if where is not None else self._address(peer)
        if report is None or not address:
            return False
        found, call = await self._dial_board(address, report.listening.mesh, peer, "board")
        if call is not None:
            self._keep(call)
        return found.outcome == "ok"

    def silent_peers(self) -> list[str]:
        """Return the peers of which a port accepted, and was silent."""
        return [peer for peer, edge in self.edges.items() if _silent(edge)]

    async def ask_silent(self, peer: str) -> None:
        """Dial silent ports of a peer anew, now that no node starts anything.

        Before, a busy machine may have left a process no core for the seconds in which an answer
        counts. What is silent at rest, too, is silent.
        """
        edge = self._edge(peer)
        async with self._slots:
            again = await self._doors.confirm(peer, _silent(edge))
        self._set(
            peer, ephemeral=tuple(again.get(dial, dial) for dial in edge.ephemeral),
            master=again.get(edge.master, edge.master) if edge.master else None,
        )  # fmt: skip

    async def measure(self, peer: str) -> None:
        """Time the path to a peer; no node may be busy with anything else."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATH_LIMIT_S), self._slots:
                await self._ask_path(peer)

    async def hold(self, peer: str) -> None:
        """Find out whether a connection to a peer outlives a minute of silence."""
        where = self.open_door(peer)
        if where is None:
            return
        _, call = await dial(self._caller, where.address, where.port, peer, "path")
        if call is None:
            return
        try:
            self._set(peer, idle=await path.hold(call))
        finally:
            await call.close()

    async def resolve(self, name: str) -> Resolved:
        """Ask this node's resolver."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._resolvers, self._system.resolve, name)

    async def close(self) -> None:
        """Close all links."""
        for task in tuple(self._links):
            task.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)
        self._resolvers.shutdown(wait=False, cancel_futures=True)

    def _keep(self, call: DialCall) -> None:
        task = asyncio.ensure_future(self._mesh.attend_call(call))
        self._links.add(task)
        task.add_done_callback(self._links.discard)

    async def _prove(self, peer: str, goal: Goal) -> None:
        """Dial again what did not answer: only now is it known that the peer listens."""
        before = self._edge(peer).mesh
        if before is not None and before.outcome == "ok":
            return
        op: wire.Op = "hello" if peer in self._mesh.linked() else "board"
        call = await self._call_by_name(peer, goal, op, PROVEN_LIMIT_S)
        if call is not None and op == "board":
            self._keep(call)
        elif call is not None:
            await call.close()
        self._report_silence(peer, before)

    def _report_silence(self, peer: str, before: Dial | None) -> None:
        """A firewall that rejects does so at once; after silence no host has the address."""
        now = self._edge(peer).mesh
        if now is None or before is None or now.outcome != "prohibited":
            return
        if before.outcome in ("drop", "no-arp") and before.address == now.address:
            self._set(peer, mesh=msgspec.structs.replace(now, outcome="no-arp"))

    async def _call_by_name(
        self, peer: str, goal: Goal, op: wire.Op, limit_s: float = LIMIT_S,
        port: int = 0,
    ) -> DialCall | None:  # fmt: skip
        """Dial the addresses of a peer in the resolver's order; keep the first one's fate."""
        report = self._exchange.reports.get(peer)
        listening = report.listening.mesh if report is not None else 0
        port = listening or port or goal.master_port
        addresses: Sequence[str] = report.addresses if report is not None else ()
        if goal.is_named:
            resolved = await self.resolve(peer)
            self._set(peer, resolved=resolved)
            addresses = resolved.addresses
            if not addresses:
                failed = Dial(outcome="unresolved", address=peer, port=port, errno=resolved.error)
                self._set(peer, mesh=failed)
                return None
        dials: list[Dial] = []
        for address in addresses:
            found, call = await self._dial_board(address, port, peer, op, limit_s)
            dials.append(found)
            if call is not None:
                break
        else:
            call = None
        if dials and not self._is_known_stranger(peer, dials):
            self._set(peer, mesh=dials[0], others=tuple(dials[1:]))
        return call

    def _is_known_stranger(self, peer: str, dials: Sequence[Dial]) -> bool:
        """Return whether an agent that is not the peer's answered before, and now no one does.

        It is on one of the ports alone, and may have ended: what it said still holds.
        """
        edge = self._edge(peer)
        before = (edge.mesh, *edge.others)
        is_stranger = any(one is not None and one.outcome in _STRANGERS for one in before)
        return is_stranger and all(one.outcome in _NO_ANSWER for one in dials)

    async def _dial_board(
        self, address: str, port: int, to: str, op: wire.Op, limit_s: float = LIMIT_S
    ) -> tuple[Dial, DialCall | None]:
        return await dial(
            self._caller, address, port, to, op, limit_s, max_segment_bytes=SMALL_SEGMENT_BYTES
        )

    async def _ask_master(self, peer: str, goal: Goal) -> None:
        if peer != goal.master or not goal.master_addr:
            return
        resolved = await self.resolve(goal.master_addr)
        found = Dial(
            outcome="unresolved", address=goal.master_addr, port=goal.master_port,
            errno=resolved.error,
        )  # fmt: skip
        for address in resolved.addresses:
            found = await self._doors.knock(House(peer, address), goal.master_port)
            if found.outcome == "ok":
                break
        self._set(peer, master=found)

    async def _ask_random(self, peer: str, num_peers: int) -> None:
        """Dial the peer's random ports at the address that its gloo advertises."""
        report = self._exchange.reports[peer]
        address = _gloo_address(report) or self._address(peer)
        place = max(self._exchange.mine.node_rank, 0)
        ports = chosen(report.listening.ephemeral, place, num_peers)
        if not address or not ports:
            return
        # of a path that is closed, too: a wrong source address may be why
        self._set(peer, source_address=plain(mtu.interface_of(self._address(peer) or address)[0]))
        facts = report.facts.ports
        low, high = (facts.range_low, facts.range_high) if facts is not None else (0, 0)
        house = House(peer, address, ports, report.listening.shut, low, high)
        await self._doors.ask(house, functools.partial(self._set, peer))

    async def _explain(self, peer: str) -> None:
        """Of a closed path, find out where the kernel sends to, and whether another way works."""
        edge = self._edge(peer)
        if not edge.ephemeral or any(dial.outcome == "ok" for dial in edge.ephemeral):
            return
        address, port = edge.ephemeral[0].address, edge.ephemeral[0].port
        way = routes.towards(address, _gloo_address(self._exchange.mine))
        self._set(peer, routes=way, neighbours=routes.next_hops(way))
        doors = (found for found in (edge.mesh, *edge.others) if found is not None)
        where = next((found.address for found in doors if found.outcome == "ok"), address)
        if where != address:
            self._set(peer, detour=await self._doors.knock(House(peer, where), port))

    async def _ask_path(self, peer: str) -> None:
        """Latency, clock, large messages and MTU, over whatever port could be reached."""
        where = self.open_door(peer)
        if where is None:
            return
        _, call = await dial(self._caller, where.address, where.port, peer, "path")
        if call is None:
            return
        try:
            self._set(peer, rtt=await _calm_ping(call))
            self._set(peer, clock=await path.clock(call))
            large_ms = await path.echo_large(call)
            if large_ms is None:  # known, whatever becomes of the rest
                self._set(peer, mtu=PathMtu(carried_bytes=-1, large_ok=False))
        except (OSError, EOFError, TimeoutError):
            return
        finally:
            await call.close()
        ports = (where.port, self._exchange.reports[peer].listening.udp)
        rtt = self._edge(peer).rtt
        if ports[1] and rtt is not None:
            num = loss.num_for(len(self.edges))
            lost = await loss.measure(self._caller.key, where.address, ports[1], rtt.median_ms, num)
            self._set(peer, datagrams=lost)
        measured = await mtu.measure(self._caller, where.address, ports, peer, large_ms)
        self._set(peer, mtu=measured)

    def open_door(self, peer: str) -> Dial | None:
        """Return a dial that got through: the control port, else a random one."""
        edge = self._edge(peer)
        tried = (edge.mesh, *edge.others, *edge.ephemeral, edge.master)
        return next((d for d in tried if d is not None and d.outcome == "ok"), None)

    def wide_door(self, peer: str) -> Dial | None:
        """The same, but none where large messages vanish: there is no bandwidth to measure."""
        mtu = self._edge(peer).mtu
        return self.open_door(peer) if mtu is None or mtu.large_ok else None

    def _address(self, peer: str) -> str:
        edge = self._edge(peer)
        for found in (edge.mesh, *edge.others):
            if found is not None and found.outcome in ("ok", "refused", "drop", "prohibited"):
                return found.address
        return next(iter(self._exchange.reports[peer].addresses), "")

    def _edge(self, peer: str) -> EdgeFacts:
        return self.edges.get(peer, EdgeFacts())

    def _set(self, peer: str, **fields: object) -> None:
        self.edges[peer] = msgspec.structs.replace(self._edge(peer), **fields)
        self._on_change()


async def _calm_ping(call: DialCall) -> Rtt:
    best = await path.ping(call)
    for _ in range(NUM_CALM - 1):
        if best.p95_ms - best.min_ms < CALM_MS:
            break
        await asyncio.sleep(CALM_PAUSE_S)
        best = min(best, await path.ping(call), key=lambda rtt: rtt.p95_ms)
    return best


def is_listening(report: NodeReport | None) -> bool:
    """Return whether a peer has said that its ports are bound and its facts are there."""
    return report is not None and STAGES.index(report.stage) >= STAGES.index("listening")


def _gloo_address(report: NodeReport) -> str:
    interfaces = report.facts.interfaces
    chosen = interfaces.gloo[0].address if interfaces is not None and interfaces.gloo else ""
    return "" if chosen.startswith("127.") or chosen == "::1" else chosen


def _silent(edge: EdgeFacts) -> list[Dial]:
    """Return the dials whose silence may be that of a busy machine."""
    dials = (edge.master, *edge.ephemeral)
    return [dial for dial in dials if dial is not None and is_silent(dial)]
