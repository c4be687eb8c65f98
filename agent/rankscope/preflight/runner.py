"""One agent's preflight from the first fact to the verdict.

0 facts of this node -> 1 listen and find the peers -> 2 and 3 all pairs: connect, latency, clock,
MTU -> 4 bandwidth in rounds -> 5 collective smoke test -> 6 the last reports and the verdict.
A phase begins when all nodes that reported have ended the one before, each wait with a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno as codes
import functools
import hashlib
import os
import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Literal

import msgspec

from rankscope.preflight import collect
from rankscope.preflight.checks.base import Run, worker_host
from rankscope.preflight.collective.schedule import Collective
from rankscope.preflight.exchange.carrier import CarrierError, carry, exchange_once, server_verdict
from rankscope.preflight.exchange.discover import Discovery, agreed, expected
from rankscope.preflight.exchange.reports import Exchange
from rankscope.preflight.facts import ports, rdma, storage
from rankscope.preflight.facts.endpoint import Endpoint, NodeList
from rankscope.preflight.model import (
    SCHEMA_VERSION,
    Gone,
    LaunchVerdict,
    Listening,
    NodeReport,
    Stage,
    Trouble,
)
from rankscope.preflight.plan import Plan, Progress
from rankscope.preflight.probe import endpoint, schedule, wire
from rankscope.preflight.probe.dial import Caller
from rankscope.preflight.probe.listener import Listener
from rankscope.preflight.probe.mesh import Mesh
from rankscope.preflight.probe.pace import Pace
from rankscope.preflight.probe.prober import MEETING_PORT, Goal, Prober, is_listening
from rankscope.preflight.probe.transfers import Transfers
from rankscope.preflight.secret import line_for_others
from rankscope.preflight.system import System
from rankscope.preflight.verdict import engine

TICK_S = 0.5  # changes of a node go out at most that often, and at the end of each phase
STAGE_LIMIT_S = 10.0  # a node that is silent for so long no longer holds the others
QUIET_LIMIT_S = 10.0  # to import torch takes 2 s on an idle core, more on a loaded one
_AFTER_TRANSFERS: tuple[Stage, ...] = ("transferred", "bandwidth")
AGREE_LIMIT_S = 5.0  # a peer that is stopped falls silent for all within 2 s
PART_LIMIT_S = 1.5  # for the peers to hear our last word
LAST_WORD_S = 0.3  # of a peer that closed its links: its report may come by another
_EPHEMERAL = (32768, 60999)  # Linux's default range, where the kernel does not say


def own_addresses(system: System) -> tuple[str, ...]:
    """Return the addresses under which others may reach this node."""
    return tuple(
        a
        for a in system.addresses()
        if not ip_address(a).is_loopback and not ip_address(a).is_link_local
    )


MAX_NAMES = 64  # of a list that travels with each report; of longer ones their digest does


def _given(who: Discovery) -> NodeList | None:
    """Return the list of nodes that this node was given."""
    if not who.nodes:
        return None
    digest = hashlib.sha256(",".join(who.nodes).encode()).hexdigest()[:16]
    names = who.nodes if len(who.nodes) <= MAX_NAMES else ()
    return NodeList(num=len(who.nodes), digest=digest, names=names, how=who.how)


@dataclass(frozen=True)
class Outcome:
    """The verdict and all that it rests on."""

    verdict: LaunchVerdict
    run: Run


class PreflightAgent:
    """One node of a preflight. `run()` does everything; `stop` ends it early with what is known."""

    def __init__(self, plan: Plan, progress: Progress) -> None:
        self._plan, self._progress = plan, progress
        self.stop = asyncio.Event()
        who = plan.who
        self.exchange = Exchange(
            NodeReport(
                schema_version=SCHEMA_VERSION, node=who.me, node_rank=who.node_rank,
                started_unix_s=time.time(), pid=os.getpid(), secret_from=plan.secret.source,
                options=plan.options, addresses=own_addresses(plan.system),
                nodes=_given(who), endpoint=Endpoint(
                    name=who.master_addr, port=who.master_port, is_said=who.is_master_said
                ),
            ),
            who.num_nodes,
            lambda why: self._collected.note(
                Trouble(part="node.absent", status="unknown", reason=why)
            ),
        )  # fmt: skip
        limit_bytes = wire.frame_limit(who.num_nodes)
        caller = self._caller = Caller(plan.key, who.me, max_frame_bytes=limit_bytes)
        self._mesh = Mesh(self.exchange, self._on_silence)
        self._listener = Listener(plan.key, who.me, self._mesh.attend, limit_bytes)
        self._prober = Prober(plan.system, caller, self.exchange, self._mesh, self._touch)
        self._transfers = Transfers(caller, self._listener)
        self._pace = Pace()
        self._collective = Collective(plan)
        self._tasks: set[asyncio.Task[None]] = set()
        self._slow: list[asyncio.Task[None]] = []
        self._collected = collect.Collected(self._touch)
        self._is_touched = self._is_shown = False
        self._rechecked: dict[str, asyncio.Task[None]] = {}
        self._server_verdict: LaunchVerdict | None = None
        self._started = time.monotonic()

    async def run(self) -> Outcome:
        """Do the preflight. The ports are free again, and no child is left, when it returns."""
        work = asyncio.ensure_future(self._work())
        stop = asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.exchange.publish(is_leaving=True, **self._fresh())
                await self._part()
            else:
                work.result()
            work.cancel()
            self._server_verdict = await server_verdict(self._plan.carriers)
        finally:
            for task in (work, stop):
                task.cancel()
            await asyncio.gather(work, stop, return_exceptions=True)
            await self._close()
        return self._outcome()

    async def _work(self) -> None:
        self._progress.stage("facts")
        await self._listen()
        for carrier in self._plan.carriers:
            self._spawn(carry(carrier, self.exchange, self._collected.note))
        await asyncio.gather(*(self._collected.add(p) for p in collect.quick_parts(self._plan)))
        self._slow = [self._spawn(self._collected.add(p)) for p in collect.slow_parts(self._plan)]
        self._reach("listening")
        await self._meet()
        await self._pairs()
        if self._plan.options.tier != "quick":
            await self._while_there(self._whom(), self._bandwidth())
            await self._run_collective()
        await asyncio.gather(*self._slow)
        await self._count_again()
        await self._see_others()
        self._reach("done")
        await self._everyone("done")
        await self._agree()
        await self._part()

    async def _listen(self) -> None:
        """Bind MASTER_PORT and random ones; who holds a taken one is a fact."""
        if not self._plan.is_mesh:
            return
        wanted, system = self._plan.who.master_port, self._plan.system
        master, master_error = await self._bind_master(wanted)
        mesh = master
        if not master:
            mesh = await self._listener.bind(0)
        if wanted != MEETING_PORT:
            with contextlib.suppress(OSError):
                await self._listener.bind(MEETING_PORT)
        low, high = ports.range_of(system) or _EPHEMERAL
        listening = Listening(
            master=master, master_error=master_error, mesh=mesh,
            udp=await self._listener.bind_udp(),
            ephemeral=await self._listener.bind_spread(low, high, ports.reserved_of(system)),
            shut=self._listener.bind_shut(),
        )  # fmt: skip
        self.exchange.publish(listening=listening)
        self._spawn(self._tick())
        self._spawn(self._mesh.watch())
        self._spawn(self._pace.measure())

    async def _bind_master(self, port: int) -> tuple[int, str]:
        """Listen on MASTER_PORT, once no other preflight does on this node; 0 and why: it is taken.

        What held it for a moment is no reason: it is tried twice.
        """
        started, num_tries = time.monotonic(), 0
        while True:
            try:
                return await self._listener.bind(port), ""
            except OSError as error:
                waited_s = time.monotonic() - started
                other = await self._prober.other_preflight(port)
                num_tries += not other
                if waited_s > self._plan.wait_s or num_tries > 1:
                    return 0, codes.errorcode.get(error.errno or 0, "")
            if not other:
                await asyncio.sleep(TICK_S)
                continue
            self._progress.stage("turn", f"{other} ({waited_s:.0f} s of {self._plan.wait_s:.0f})")
            await asyncio.sleep(TICK_S)

    async def _meet(self) -> None:
        """Call all nodes until they have reported; dial all ports of each as soon as it listens."""
        goal, deadline = self._goal(), time.monotonic() + self._plan.wait_s
        calling: dict[str, asyncio.Task[None]] = {}
        reaching: dict[str, asyncio.Task[None]] = {}
        is_open = self._plan.is_mesh and self._plan.who.num_nodes > 1
        if is_open and self._plan.who.nodes:
            calling = {p: self._spawn(self._prober.meet(p, goal)) for p in self._whom()}
        elif is_open and goal.master_addr:
            calling[""] = self._spawn(self._prober.meet_master(goal))
        while True:
            for peer in self._listening_peers() if is_open else ():
                if peer not in reaching:
                    if peer in calling:
                        calling[peer].cancel()
                    work = self._prober.reach(peer, self._goal())
                    reaching[peer] = self._spawn(self._while_there((peer,), work))
            self._show_secret()
            missing = self.missing_reports()
            if not missing or time.monotonic() > deadline:
                break
            self._progress.stage("waiting", self._waiting_for(missing, deadline))
            await self.exchange.wait(functools.partial(self._lacks_other_than, missing), 0.5)
        for task in calling.values():
            task.cancel()
        self._start_collective()
        asking = [self._spawn(self._ask_endpoint())] if is_open else []
        await asyncio.gather(*reaching.values(), *asking, return_exceptions=True)

    async def _ask_endpoint(self) -> None:
        """See who answers where this node will look for the store."""
        believed = self.exchange.mine.endpoint
        if believed is not None and believed.name:
            resolve = self._prober.resolve
            found = await endpoint.ask(self._caller, believed, resolve)
            if name := worker_host(self._merged())[1]:
                found = msgspec.structs.replace(found, workers=await resolve(name))
            self.exchange.publish(endpoint=found)

    def _show_secret(self) -> None:
        """Show node 0 the line that lets nodes in which do not share its secret."""
        edges, secret = self._prober.edges, self._plan.secret
        odd = [p for p, e in edges.items() if e.mesh and e.mesh.outcome == "other-secret"]
        if odd and not self._is_shown and self._plan.who.me == self._expected()[0]:
            self._is_shown = True
            if secret.is_own or secret.path:
                whom = f"{', '.join(odd[:4])}: another secret. There, then start it again"
                self._progress.note(f"{whom}: {line_for_others(secret, sys.stderr.isatty())}")

    def _start_collective(self) -> None:
        """Have torch imported while ports are dialled."""
        self._collective.start(self._merged(), self._listener.lend)
        listening = self.exchange.mine.listening
        self.exchange.publish(
            listening=msgspec.structs.replace(listening, store=self._collective.port)
        )

    def _listening_peers(self) -> list[str]:
        gone = self.exchange.gone()
        reports = self.exchange.reports
        return [p for p in self._whom() if is_listening(reports.get(p)) and p not in gone]

    def missing_reports(self) -> tuple[str, ...]:
        """Return who has not reported that it listens, and may still come."""
        gone, reports = self.exchange.gone(), self.exchange.reports
        return tuple(
            name
            for name in self._expected()
            if not is_listening(reports.get(name))
            and name not in gone
            and not self._prober.is_stuck(name)
        )

    def _lacks_other_than(self, missing: tuple[str, ...]) -> bool:
        return self.missing_reports() != missing

    def _waiting_for(self, missing: tuple[str, ...], deadline: float) -> str:
        total = len(self._expected())
        names = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if missing[4:] else "")
        waited = self._plan.wait_s - (deadline - time.monotonic())
        return (
            f"{names} ({total - len(missing)} of {total} reported, "
            f"{waited:.0f} s of {self._plan.wait_s:.0f})"
        )

    async def _pairs(self) -> None:
        """Time the paths once every node is quiet: no facts are collected, torch is imported."""
        self._progress.stage("quiet", "for this machine to be quiet")
        importing = self._spawn(self._collective.imported())
        await asyncio.wait([*self._slow, importing], timeout=QUIET_LIMIT_S)
        self._reach("reached")
        await self._everyone("reached")
        await asyncio.gather(
            *(
                self._while_there((peer,), self._prober.ask_silent(peer))
                for peer in self._prober.silent_peers()
            )
        )
        peers = [p for p in self._listening_peers() if self._prober.open_door(p) is not None]
        if peers:
            self._progress.stage("paths", f"to {len(peers)} nodes")
        self._pace.forget()
        await asyncio.gather(
            *(self._while_there((peer,), self._prober.measure(peer)) for peer in peers)
        )
        if self._plan.options.tier == "deep":
            self._slow += [
                self._spawn(self._prober.hold(peer))
                for peer in peers
                if self.exchange.reports[peer].options.tier == "deep"  # others do not stay so long
            ]
        self._reach("pairs", delay_p90_ms=self._pace.p90_ms())
        await self._everyone("pairs")

    async def _bandwidth(self) -> None:
        gone, reports = self.exchange.gone(), self.exchange.reports
        nodes = tuple(n for n in self._expected() if is_listening(reports.get(n)) and n not in gone)
        options = self._plan.options
        is_asked = any(not options.left_out(id, "paths") for id in ("net.bandwidth", "net.loss"))
        if self._plan.is_mesh and len(nodes) > 1 and is_asked:
            self._progress.stage("bandwidth", f"{len(nodes)} nodes in rounds")
            drawn = schedule.rounds(nodes, self._plan.run_id)
            repeats = 2 if len(nodes) <= 4 else 1
            await self._transfers.run(drawn, self._prober.wide_door, repeats)
            for stage in _AFTER_TRANSFERS:
                self._reach(stage)
                await self._everyone(stage)
            await self._look_again()
        self._reach("again")
        await self._everyone("again")

    async def _look_again(self) -> None:
        """Measure what was slow a second time, alone: a stray figure accuses no node."""
        speeds = {
            (start, end): edge.bandwidth.mbit_per_s
            for start, end, edge in self._merged().edges()
            if edge.bandwidth is not None
        }
        expected_mbit = self._plan.options.expect_gbps * 1e3
        await self._transfers.run_again(
            schedule.again(speeds, expected_mbit), self._prober.wide_door
        )

    async def _run_collective(self) -> None:
        if self._collective.port:
            self._progress.stage("collective", f"{len(self.exchange.reports)} nodes")
        facts = await self._collective.run(self.exchange, self._merged(), self._listener.leave)
        self._collected.set(smoke=facts)
        self._reach("collective")

    async def _count_again(self) -> None:
        """See how far the errors of RDMA ports went while the paths were used."""
        facts = self._collected.facts.rdma
        if facts is not None and facts.ports:
            count = functools.partial(rdma.again, self._plan.system, facts)
            await self._collected.add(collect.Part("rdma", count, collect.QUICK_LIMIT_S))

    async def _see_others(self) -> None:
        options = self._plan.options
        facts = self._collected.facts.storage
        if not options.checkpoint_dir or facts is None:
            return
        await self._everyone("collective" if options.tier != "quick" else "pairs")
        look = functools.partial(
            storage.see_others, self._plan.system, options, self._plan.run_id, self._expected(),
            facts,
        )  # fmt: skip
        await self._collected.add(collect.Part("storage", look, collect.SLOW_LIMIT_S))

    async def _agree(self) -> None:
        """Hear from the others whether a node is gone, before that is no answer but our guess."""

        def is_over() -> bool:
            return self.exchange.is_agreed() or self._is_alone()

        await self.exchange.wait(is_over, AGREE_LIMIT_S)

    async def _part(self) -> None:
        """Let the peers hear our last word, and hear theirs."""
        for carrier in self._plan.carriers:
            with contextlib.suppress(CarrierError, TimeoutError):
                async with asyncio.timeout(PART_LIMIT_S):
                    await exchange_once(carrier, self.exchange)
        await self.exchange.wait(self._mesh.all_know, PART_LIMIT_S)

    async def _close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for carrier in self._plan.carriers:
            with contextlib.suppress(OSError):
                await carrier.close()
        await self._collective.stop()
        await self._prober.close()
        await self._listener.close()
        if self._plan.options.checkpoint_dir:
            plan = self._plan
            storage.clean(plan.system, plan.options, plan.run_id, plan.who.me)

    def _outcome(self) -> Outcome:
        run = self._merged()
        verdict = self._server_verdict or engine.evaluate(run, self._plan.foreign)
        elapsed_ms = (time.monotonic() - self._started) * 1e3
        verdict = msgspec.structs.replace(
            verdict, elapsed_ms=elapsed_ms, coverage=schedule.coverage(run.expected),
            is_partial=verdict.is_partial or self.stop.is_set(),
        )  # fmt: skip
        return Outcome(verdict, run)

    def _merged(self) -> Run:
        return Run(
            self._plan.run_id, self._expected(), dict(self.exchange.reports), self._plan.options
        )

    def _expected(self) -> tuple[str, ...]:
        reports = self.exchange.reports
        ranks = {name: report.node_rank for name, report in reports.items()}
        lists = [report.nodes.names for report in reports.values() if report.nodes is not None]
        return expected(agreed(self._plan.who, lists), ranks)

    def _whom(self) -> tuple[str, ...]:
        """Return the peers that this node probes."""
        names = self._expected()
        if self._plan.who.me not in names:
            return ()
        return schedule.pairs_of(self._plan.who.me, names, self._plan.run_id)

    def _goal(self) -> Goal:
        who, names = self._plan.who, self._expected()
        return Goal(
            is_named=bool(who.nodes), master=self._merged().master or (names[0] if names else ""),
            master_addr=who.master_addr, master_port=who.master_port, num_peers=len(self._whom()),
        )  # fmt: skip

    def _reach(self, stage: Stage, **fields: object) -> None:
        self._is_touched = False
        self.exchange.publish(stage=stage, **self._fresh(), **fields)

    async def _everyone(self, stage: Stage) -> None:
        def is_over() -> bool:
            return self.exchange.have_reached(stage) or self._is_alone()

        if await self.exchange.wait(is_over, STAGE_LIMIT_S):
            return
        linked = self._mesh.linked()  # which says itself whether they are there
        for node in self.exchange.behind(stage):
            if node not in linked and node != self._plan.who.me:
                self._note_gone(node, "silent")

    def _on_silence(self, peer: str, how: str) -> None:
        """Take note of a peer whose links are closed ("closed") or "silent", or that is back."""
        if how == "closed" and peer not in self._rechecked:
            self._rechecked[peer] = self._spawn(self._look_after(peer))
        elif how == "silent":
            self._note_gone(peer, "silent")
        elif not how:
            self._note_back(peer)

    async def _look_after(self, peer: str) -> None:
        """Call a peer whose links are closed: it may be there, with a connection cut in between."""
        await asyncio.sleep(LAST_WORD_S)
        report = self.exchange.reports.get(peer)
        is_over = report is None or report.is_leaving or report.stage == "done"
        if not is_over and not self._is_linked(peer) and not await self._prober.call_again(peer):
            if not self._is_linked(peer):  # it has called us meanwhile, where we cannot call it
                self._note_gone(peer, "closed")
        self._rechecked.pop(peer, None)

    def _is_linked(self, peer: str) -> bool:
        return peer in self._mesh.linked()

    def _note_gone(self, peer: str, how: Literal["closed", "silent"]) -> None:
        report = self.exchange.reports.get(peer)
        if report is None or peer in self.exchange.mine.gone:
            return
        after_s = round(time.monotonic() - self._started, 1)
        gone = Gone(how=how, stage=report.stage, after_s=after_s)
        self.exchange.publish(gone={**self.exchange.mine.gone, peer: gone})

    def _note_back(self, peer: str) -> None:
        left = {name: gone for name, gone in self.exchange.mine.gone.items() if name != peer}
        if len(left) < len(self.exchange.mine.gone):
            self.exchange.publish(gone=left)

    async def _while_there(self, peers: tuple[str, ...], work: Coroutine[Any, Any, None]) -> None:
        """Do `work` with peers until one of them is gone."""
        await self.exchange.unless(lambda: bool(self.exchange.gone() & set(peers)), work)

    def _is_alone(self) -> bool:
        """Return whether no news can come any more."""
        return not self._mesh.linked() and not self._plan.carriers

    def _fresh(self) -> dict[str, object]:
        edges = dict(self._prober.edges)
        for peer in self._transfers.peers() & set(edges):
            bandwidth = self._transfers.bandwidth(peer)
            edges[peer] = msgspec.structs.replace(edges[peer], bandwidth=bandwidth)
        heard = tuple(sorted(self._listener.heard | self._mesh.linked()))
        return {"edges": edges, "heard": heard, **self._collected.fields()}

    def _touch(self) -> None:
        self._is_touched = True

    async def _tick(self) -> None:
        """Publish what was measured, should it be ended early."""
        while True:
            await asyncio.sleep(TICK_S)
            if self._is_touched:
                self._is_touched = False
                self.exchange.publish(**self._fresh())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
