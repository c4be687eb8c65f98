"""All preflights that are under way: made, found, evaluated, saved, forgotten.

They live in the memory of one process: of several on one store the one with the lease coordinates
all, the others say so and serve what has ended.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import msgspec
import sqlalchemy as sa
from starlette.concurrency import run_in_threadpool

from rankscope.preflight.checks.base import Run
from rankscope.preflight.model import LaunchVerdict, NodeReport
from rankscope.preflight.probe.schedule import coverage
from rankscope.preflight.verdict.engine import evaluate
from rankscope_server.broker import Broker
from rankscope_server.limits import Buckets
from rankscope_server.preflight import store
from rankscope_server.preflight.live import Live
from rankscope_server.problems import Problem, no_preflight
from rankscope_server.store.engine import StoreUnavailableError
from rankscope_server.store.leases import PREFLIGHTS, Held, Leases
from rankscope_server.store.unit import Unit
from rankscope_server.store.writer import Writer

log = logging.getLogger(__name__)
TOKEN_PREFIX = "pf-"
LIFETIME_NS = 3600 * 10**9  # of a preflight and its token
REUSED_NS = 600 * 10**9  # later, the same key begins a new one
MAX_LIVE = 256
CREATED_SIZE, CREATED_PER_S = 30, 0.5  # new preflights of one address
KEPT_AFTER_END_NS = 300 * 10**9  # in memory, for those who ask again
TICK_S = 0.05
SAVE_PAUSE_S = 1.0
VERDICT_PAUSE_S = 1.0  # a verdict that is asked for again and again is not made anew each time


class Hub:
    """The preflights under way. Use it in the event loop only."""

    def __init__(self, writer: Writer, reader: sa.Engine, broker: Broker, leases: Leases) -> None:
        self._writer, self._reader, self._broker = writer, reader, broker
        self._leases = leases
        self._lease: Held | None = None
        self._loaded: Held | None = None  # the lease under which `_runs` were loaded
        self._runs: dict[str, Live] = {}
        self._task: asyncio.Task[None] | None = None
        self._jobs: set[asyncio.Task[LaunchVerdict]] = set()
        self._saving: dict[str, Future[None]] = {}
        self._saved_s = 0.0
        self.limits = Buckets()

    async def start(self) -> None:
        """Load what was under way, and begin to hint at changes."""
        await self._follow_lease()
        self._task = asyncio.create_task(self._work())

    async def stop(self) -> None:
        """Save what there is."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, *self._jobs, return_exceptions=True)
        self._save_all()

    def check_here(self) -> None:
        """Raise Problem 503 where another process coordinates the preflights under way."""
        if self._lease is None:
            raise Problem(
                503, "another server of this store coordinates preflights", None,
                "send it there: let the load balancer try the next server (docs/postgresql.md)",
                retry_after_s=1.0,
            )  # fmt: skip

    @property
    def is_closed(self) -> bool:
        """Return whether the server ends; no client should wait any more."""
        return self._broker.closed

    def under_way(self, key: str, project: str) -> Live | None:
        """Return the preflight in which those of a project with this key meet now."""
        for live in self._runs.values() if key else ():
            is_young = time.time_ns() - live.created_ns < REUSED_NS
            is_over = live.finished_ns or any(s.report.is_leaving for s in live.stored.values())
            is_ours = live.key == key and live.project == project
            if is_ours and is_young and not is_over:
                return live
        return None

    def num_apart(self, key: str, project: str) -> int:
        """Return how many preflights under way have the same name in their key, and are not it.

        A key is a name and, after a blank, a proof: those with another secret are kept apart.
        """
        name = key.rpartition(" ")[0]
        mine = (live for live in self._runs.values() if live.project == project and name)
        keys = {live.key for live in mine if not live.finished_ns}
        return sum(other != key and other.rpartition(" ")[0] == name for other in keys)

    def spend_new(self, address: str) -> None:
        """Count a new preflight against the limit of an address. Raises Problem 429."""
        wait_s = self.limits.wait_s(f"create {address}", CREATED_SIZE, CREATED_PER_S)
        if wait_s:
            raise Problem(429, "too many new preflights", None, f"try again in {wait_s:.0f} s")

    def create(
        self, num_nodes: int, nodes: tuple[str, ...], key: str, run_id: str, project: str
    ) -> Live:
        """Make a preflight. Raises Problem 429, 503."""
        self.check_here()
        if len(self._runs) >= MAX_LIVE:
            raise Problem(
                429, f"{MAX_LIVE} preflights are under way", None, "wait until some of them end"
            )
        now = time.time_ns()
        live = Live(
            id=secrets.token_hex(6), token=TOKEN_PREFIX + secrets.token_urlsafe(24), created_ns=now,
            expires_ns=now + LIFETIME_NS, run_id=run_id, key=key, nodes=nodes, num_nodes=num_nodes,
            project=project,
        )  # fmt: skip
        self._runs[live.id] = live
        self._broker.publish("preflights", {"preflights"}, None)
        self.announce(live, {"reports"})  # a project hears of its own alone
        return live

    def live(self, id: str) -> Live | None:
        """Return a preflight that is in memory."""
        return self._runs.get(id)

    async def find(self, id: str) -> Live:
        """Return a preflight, from the store where it has ended. Raises Problem 404, 503."""
        live = self._runs.get(id) or await run_in_threadpool(self._load, id)
        if live is None:
            raise no_preflight(id)
        if not live.finished_ns and time.time_ns() < live.expires_ns:
            self.check_here()
        return live

    def of_token(self, token: str) -> Live | None:
        """Return the preflight whose token this is. Raises Problem 503."""
        if token.startswith(TOKEN_PREFIX):
            self.check_here()
        return next((live for live in self._runs.values() if is_token_of(live, token)), None)

    async def verdict(self, live: Live) -> LaunchVerdict:
        """Return the verdict over what has been reported by now; made once for all who ask."""
        async with live.evaluating:
            is_early = time.monotonic() < live.next_verdict_s and not live.is_settled
            if live.verdict is not None and (is_early or live.evaluated_number == live.number):
                return live.verdict
            number, run, started = live.number, live.as_run(), time.monotonic()
            live.has_failed = True  # until it has not: it is not tried again at each tick
            verdict = await run_in_threadpool(_evaluate, run, live.created_ns)
            live.evaluated(verdict, number)
            ended = time.monotonic()
            live.next_verdict_s = ended + max(VERDICT_PAUSE_S, 3 * (ended - started))
        self._broker.publish(f"preflight:{live.id}", {"verdict"}, None)
        return verdict

    def announce(self, live: Live, changed: set[str]) -> None:
        """Hint on the event stream that something changed."""
        self._broker.publish(f"preflight:{live.id}", changed, None)

    def upload(self, live: Live) -> None:
        """Store a preflight that was coordinated otherwise; wait for the commit."""
        rows = store.rows_of(live, live.members)
        self._writer.run(lambda unit: rows.save(unit.connection))
        self._broker.publish("preflights", {"preflights"}, None)
        self.announce(live, {"reports"})  # a project hears of its own alone

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Give a connection that sees one state of the store."""
        with self._reader.connect() as connection:
            yield connection

    async def _follow_lease(self) -> None:
        """Load what is under way where this process is the one that coordinates from now on."""
        lease = self._leases.hold(PREFLIGHTS)
        if lease is not None and lease != self._loaded:
            try:
                runs = await run_in_threadpool(self._load_open)
            except sa.exc.SQLAlchemyError as error:
                log.warning("preflights under way are not known now: %s", error)
                lease = None  # it is tried again
            else:
                self._saving.clear()
                self._runs, self._loaded = runs, lease
        self._lease = lease

    def _load(self, id: str) -> Live | None:
        with self.read() as connection:
            row = store.find(connection, id) if "\x00" not in id else None
            return None if row is None else store.load_live(connection, row)

    def _load_open(self) -> dict[str, Live]:
        with self.read() as connection:
            rows = store.open_rows(connection, time.time_ns())
            return {row.id: store.load_live(connection, row) for row in rows[:MAX_LIVE]}

    async def _work(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await self._follow_lease()
            now_s, now_ns = time.monotonic(), time.time_ns()
            for live in tuple(self._runs.values()):
                if live.wake(now_s, self.is_closed):
                    self.announce(live, {"reports"})
                self._end(live, now_ns)
            if now_s - self._saved_s >= SAVE_PAUSE_S:
                self._saved_s = now_s
                self._save_all()

    def _end(self, live: Live, now_ns: int) -> None:
        """Make the verdict of a preflight that has ended; forget it a while later: it is stored."""
        is_over = live.is_settled or (live.is_calm and live.stored)
        is_due = is_over and live.evaluated_number != live.number and not live.has_failed
        if is_due and not live.evaluating.locked():
            job = asyncio.create_task(self.verdict(live))
            self._jobs.add(job)
            job.add_done_callback(self._ended)
        if live.is_unsaved or live.id in self._saving:
            return
        is_old = live.finished_ns and now_ns - live.finished_ns > KEPT_AFTER_END_NS
        if is_old or now_ns > live.expires_ns:
            del self._runs[live.id]

    def _ended(self, job: asyncio.Task[LaunchVerdict]) -> None:
        self._jobs.discard(job)
        if not job.cancelled() and job.exception() is not None:
            log.error("the verdict of a preflight could not be made", exc_info=job.exception())

    def _save_all(self) -> None:
        """Hand to the writer what changed; what it refuses is tried again."""
        for id, done in list(self._saving.items()):
            if done.done():
                del self._saving[id]
                live = self._runs.get(id)
                if live is not None and done.exception() is not None:
                    log.warning("preflight %s is not saved yet: %s", id, done.exception())
                    live.is_unsaved, live.unsaved = True, set(live.members)
        for live in self._runs.values():
            if not live.is_unsaved or live.id in self._saving:
                continue
            if self._lease is None:
                return
            rows = store.rows_of(live, tuple(live.unsaved))
            try:
                self._saving[live.id] = self._writer.submit(_saving(rows, self._lease))
            except StoreUnavailableError as error:
                log.warning("preflight %s is not saved yet: %s", live.id, error)
                continue
            live.unsaved.clear()
            live.is_unsaved = False


def is_token_of(live: Live, token: str) -> bool:
    """Return whether this is the token of an unexpired preflight."""
    return (
        bool(live.token)
        and hmac.compare_digest(live.token.encode(), token.encode())
        and time.time_ns() < live.expires_ns
    )


def reports_of(live: Live) -> dict[str, NodeReport]:
    """Return the reports of a preflight by node."""
    return {node: stored.report for node, stored in live.stored.items()}


def _evaluate(run: Run, created_ns: int) -> LaunchVerdict:
    elapsed_ms = (time.time_ns() - created_ns) / 1e6
    added = {"coverage": coverage(run.expected), "elapsed_ms": elapsed_ms}
    return msgspec.structs.replace(evaluate(run), **added)


def _saving(rows: store.Rows, lease: Held) -> Callable[[Unit], None]:
    def work(unit: Unit) -> None:
        lease.check(unit.connection)
        rows.save(unit.connection)

    return work
