"""Looks at every live run once a second and keeps the store in step with what it sees.

One thread owns all run states, so they need no lock. A run enters memory with its first batch
and is then rebuilt from the store: a restarted server knows what it knew before. A look that
fails costs its run an answer, never the server. Of several processes on one store the one that
holds the lease of a run looks at it; what the others store of it is read from there.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import sqlalchemy as sa

from rankscope.wire.chunk import decode_chunks
from rankscope.wire.schema import AnyRecord, Chunk
from rankscope_server.analysis.asking import ask_in_hangs, ask_of_the_slow, ask_to_thin
from rankscope_server.analysis.baselines import earlier_runs
from rankscope_server.analysis.following import newest_block, read_others
from rankscope_server.analysis.keeping import Keeper
from rankscope_server.analysis.notable_lines import notable_lines, usual_lines
from rankscope_server.analysis.shedding import Load, Shedding
from rankscope_server.analysis.state import RunState, Work
from rankscope_server.analysis.stored_findings import Outcome, store_failure, store_look
from rankscope_server.broker import Broker
from rankscope_server.ingest.chunks import ValidatedChunk
from rankscope_server.ingest.intake import Intake
from rankscope_server.settings import Settings
from rankscope_server.store import tables
from rankscope_server.store.analysis_states import forget, forget_ended
from rankscope_server.store.deletion import OVER, find_deletion
from rankscope_server.store.engine import StoreUnavailableError
from rankscope_server.store.leases import Held, LeaseLostError, Leases
from rankscope_server.store.locks import of_run
from rankscope_server.store.restart import newest_batch, replay
from rankscope_server.store.writer import Writer

log = logging.getLogger(__name__)
# What waits in memory for looks, of all runs. Beyond the first bound chunks wait as they came, and
# are decoded when it is their turn; beyond the second the run with most is read from the store.
MAX_WAITING_EVENTS = 1_000_000  # some 180 MB of columns
# As many go to the tables before the next look: they would only wait for it.
_MANY_EVENTS = 200_000
MAX_WAITING_BYTES = 256 << 20
_BATCHES_AT_ONCE = 64  # go to the tables: the chunks of several are decoded in half of the time
FAILURE_LOG_SECONDS = 60.0
_MAX_PAUSE_SECONDS, _MAX_PAUSE_BEHIND_SECONDS = 1.25, 10.0
_DECIDE_SECONDS = 1.0
# Of the time since the last news: how late a look may find that there are none.
_QUIET_SHARE, _MAX_QUIET_PAUSE_SECONDS = 0.1, 30.0
BEHIND_SECONDS = 3.0  # a delay of less is no news: looks are a second apart
_BYTES_PER_RECORD = 1_000  # about what a decoded one takes
# A run that another process looks at, and of which nothing is heard for so long, may be over. That
# process keeps it a while longer: it must not come here when it is given back.
_ELSEWHERE_SECONDS = 15.0
_OVER_SECONDS = 60.0
_ANY_BATCH = 1 << 62


@dataclass(slots=True)
class Fed:
    """A stored batch on its way into the analysis."""

    batch_id: int
    records: list[AnyRecord]
    chunks: list[ValidatedChunk] | list[Chunk]
    num_events: int  # of decoded chunks
    num_bytes: int  # of chunks as they came


@dataclass(slots=True)
class LiveRun:
    """What memory holds of a run."""

    state: RunState | None = None
    waiting: deque[Fed] = field(default_factory=deque)
    waiting_events: int = 0
    waiting_bytes: int = 0
    last_batch: int = 0  # all up to this one are in the state
    last_block: int = 0  # of log lines, the same
    lease: Held | None = None
    is_elsewhere: bool = False  # another process looks at it
    load: Load | None = None  # at the last look; None before the first
    last_news: float = field(default_factory=time.monotonic)
    looked: float = 0.0  # when the newest look that was stored began
    news_since: float | None = None  # first batch that came after that look began
    seeing_since: float | None = None  # the same of the look that is under way
    outcome: Outcome = field(default_factory=Outcome)
    failure: str = ""
    failure_logged: float = 0.0
    keeper: Keeper = field(default_factory=Keeper)
    making: list[tuple[RunState, Work, Future[object]]] = field(default_factory=list)

    def is_due(self, now: float) -> bool:
        """Return whether a look may find something else; `now` is of the monotonic clock.

        Without news it is only later than before: the longer nothing came, the less that is.
        """
        if self.news_since is not None or self.seeing_since is not None:
            return True
        pause = min(_QUIET_SHARE * (now - self.last_news), _MAX_QUIET_PAUSE_SECONDS)
        return now - self.looked >= pause

    def check(self, connection: sa.Connection) -> None:
        """Raise LeaseLostError where another process looks at it now."""
        if self.lease is None:
            raise LeaseLostError("the lease of this run was given up")
        self.lease.check(connection)

    def take(self, count: int, newest: int) -> list[Fed]:
        """Return the next of what waits, up to batch `newest`, which waits no more."""
        taken: list[Fed] = []
        while self.waiting and self.waiting[0].batch_id <= newest and len(taken) < count:
            fed = self.waiting.popleft()
            self.waiting_events -= fed.num_events
            self.waiting_bytes -= fed.num_bytes + _BYTES_PER_RECORD * len(fed.records)
            taken.append(fed)
        return taken

    def apply(self, state: RunState, batches: Sequence[Fed]) -> None:
        """Put batches, in their order, into the state of the run, but those that it has."""
        news = [fed for fed in batches if fed.batch_id > self.last_batch]
        data = (part.data for fed in news for part in fed.chunks if isinstance(part, Chunk))
        decoded = decode_chunks(data)
        for fed in news:
            for record in fed.records:
                state.apply_record(record)
            for part in fed.chunks:
                if isinstance(part, Chunk):
                    state.apply_chunk(part, next(decoded))
                else:
                    state.apply_chunk(part.chunk, part.columns, part.calls)
            self.last_batch = fed.batch_id
            self.keeper.num_new += 1

    def read_later(self) -> None:
        """Forget what waits and what is known: the store holds both."""
        self.state = None
        self.making = []
        self.waiting.clear()
        self.waiting_events = self.waiting_bytes = 0

    def set_aside(self, lease: Held | None) -> None:
        """Forget what was known under another lease, or none: the store knows more by now."""
        self.read_later()
        self.load, self.outcome, self.failure = None, Outcome(), ""
        self.keeper, self.looked = Keeper(), 0.0
        self.lease, self.is_elsewhere = lease, lease is None
        if lease is None:
            self.news_since = self.seeing_since = None


class AnalysisLoop:
    """Owns the run states. `feed` from any thread; `start` and `close` once."""

    def __init__(
        self,
        settings: Settings,
        writer: Writer,
        reader: sa.Engine,
        broker: Broker,
        leases: Leases,
        clock: Callable[[], int] = time.time_ns,
        intake: Intake | None = None,
    ) -> None:
        self._settings, self._writer, self._reader = settings, writer, reader
        self._broker, self._leases, self._clock = broker, leases, clock
        self._intake = intake or Intake()
        self._lock = threading.Lock()
        self._runs: dict[str, LiveRun] = {}
        self.num_looks, self.look_seconds = 0, 0.0
        self._looked = time.monotonic()  # when the loop went through all runs last
        self._lag_seconds = 0.0  # of the run that waited longest in this round of looks
        self.shedding = Shedding()
        self._stop, self._many_wait = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="rankscope-analysis", daemon=True)
        self._makers = ThreadPoolExecutor(1, "rankscope-replay")

    def start(self) -> None:
        """Take up the runs that were live when the server ended, and begin to look."""
        try:
            self._writer.run(forget_ended)
        except StoreUnavailableError as error:  # a server with a full disk starts too
            log.info("what was kept of runs that are over stays for now: %s", error)
        self._take_up_live_runs()
        self._thread.start()

    def close(self, timeout_seconds: float = 10.0) -> None:
        """Stop looking; a look that is under way is waited for, as it uses the store."""
        self._stop.set()
        self._many_wait.set()
        self._thread.join(timeout_seconds)
        self._makers.shutdown(wait=False, cancel_futures=True)

    @property
    def num_runs(self) -> int:
        """Return how many runs this process looks at."""
        return sum(not run.is_elsewhere for run in list(self._runs.values()))

    @property
    def is_alive(self) -> bool:
        """Return whether its thread works."""
        return self._thread.is_alive()

    @property
    def num_behind(self) -> int:
        """Return how many of them have stored batches that no look has seen yet."""
        runs = [run for run in list(self._runs.values()) if not run.is_elsewhere]
        return sum(run.last_news >= run.looked for run in runs)

    @property
    def lag_seconds(self) -> float:
        """Return how long ago the oldest stored batch came that no look has seen; 0 for none."""
        since = [
            moment
            for run in list(self._runs.values())
            for moment in (run.seeing_since, run.news_since)
            if moment is not None
        ]
        return time.monotonic() - min(since) if since else 0.0

    @property
    def behind_seconds(self) -> float:
        """Return for how long stored batches wait for a look, whichever process is to look."""
        return max(self.own_behind_seconds, self._leases.others.behind_seconds)

    @property
    def own_behind_seconds(self) -> float:
        """Return for how long batches wait for this process, or its loop for its turn."""
        stuck = time.monotonic() - self._looked - self._settings.look_seconds
        return max(self.lag_seconds, stuck, 0.0)

    def feed(
        self, run_id: str, batch_id: int, records: list[AnyRecord], chunks: list[ValidatedChunk]
    ) -> None:
        """Hand over a batch that is durable."""
        if run_id not in self._runs:
            self._leases.hold(_lease_of(run_id), run_id)  # the sooner it is asked for
        with self._lock:
            run = self._runs.setdefault(run_id, LiveRun())
            run.last_news = time.monotonic()
            if run.is_elsewhere:
                return
            run.news_since = run.news_since or run.last_news
            if run.state is None and not run.waiting:
                # The store holds this batch already; the rebuild will read it from there.
                return
            num_events = sum(part.chunk.count for part in chunks)
            fed = Fed(batch_id, records, chunks, num_events, sum(len(p.chunk.data) for p in chunks))
            waiting = sum(known.waiting_events for known in self._runs.values())
            if waiting + num_events > MAX_WAITING_EVENTS:
                fed.chunks, fed.num_events = [part.chunk for part in chunks], 0
            run.waiting.append(fed)
            run.waiting_events += fed.num_events
            run.waiting_bytes += fed.num_bytes + _BYTES_PER_RECORD * len(records)
            if run.waiting_events > _MANY_EVENTS:
                self._many_wait.set()
            while sum(known.waiting_bytes for known in self._runs.values()) > MAX_WAITING_BYTES:
                max(self._runs.values(), key=lambda known: known.waiting_bytes).read_later()

    def heard(self, run_id: str) -> None:
        """Take note that another process stored something of a run; the next look reads it."""
        with self._lock:
            run = self._runs.get(run_id)
            if run is not None and not run.is_elsewhere:
                run.last_news = time.monotonic()
                run.news_since = run.news_since or run.last_news

    def forget(self, run_id: str) -> None:
        """Let a run that was deleted leave memory."""
        with self._lock:
            self._runs.pop(run_id, None)
        self._leases.release(_lease_of(run_id))

    def look_now(self, *, is_every_run: bool = True) -> None:
        """Look once at every live run, or at those where that may find something else."""
        if self._leases.is_shared:
            self._learn_of_runs()
        self._lag_seconds = 0.0
        for run_id in list(self._runs):
            if self._stop.is_set():
                return
            run = self._runs.get(run_id)
            if run is None or not self._is_ours(run_id, run):  # None: it was deleted meanwhile
                continue
            if is_every_run or run.is_due(time.monotonic()):
                self._look(run_id, run)
        self._forget_silent_runs()
        self._looked = time.monotonic()
        self._shed()

    def _shed(self) -> None:
        """Decide what runs should leave out for this server's sake; the next look asks for it."""
        loads = {name: run.load for name, run in list(self._runs.items()) if run.load is not None}
        self.shedding.turn(self._intake.own_delay_seconds(), self._lag_seconds, loads)

    def _work(self) -> None:
        due = time.monotonic() + self._settings.look_seconds
        while not self._stop.is_set():
            if self._many_wait.wait(max(min(due - time.monotonic(), _DECIDE_SECONDS), 0.0)):
                self._many_wait.clear()
                self._take_many()
            began = time.monotonic()
            if began < due or self._stop.is_set():
                if self._intake.own_delay_seconds() > BEHIND_SECONDS:
                    self._shed()
                continue
            self.look_now(is_every_run=False)
            ended = time.monotonic()
            # Looks take a fifth of the time, while findings stay a few seconds young; where batches
            # wait for this server findings wait first.
            is_behind = self._intake.own_delay_seconds() > BEHIND_SECONDS
            most = _MAX_PAUSE_BEHIND_SECONDS if is_behind else _MAX_PAUSE_SECONDS
            due = ended + max(min(4.0 * (ended - began), most), self._settings.look_seconds)
            self._keep_due()
        self._keep_all()

    def _make_deferred(self, run: LiveRun, state: RunState) -> None:
        """Have made what the look deferred, beside this thread; a later look takes it."""
        for work in state.deferred():
            run.making.append((state, work, self._makers.submit(work.what.make)))

    @staticmethod
    def _adopt_made(run: LiveRun, state: RunState) -> None:
        """Give a run what was made of what its looks deferred."""
        making, run.making = run.making, []  # of a state that was forgotten nothing stays
        failures = []
        for of, work, future in making:
            if of is not state:
                continue
            if not future.done():
                run.making.append((of, work, future))
                continue
            error = future.exception()
            if error is None:
                state.adopt(work, future.result())
            else:
                state.give_up(work)
                failures.append(error)
        if failures:
            raise failures[0]

    def _take_many(self) -> None:
        """Give what waits of runs that send much to their tables."""
        for run_id, run in list(self._runs.items()):
            is_known = run.state is not None and not run.is_elsewhere
            if is_known and run.waiting_events > _MANY_EVENTS and self._is_ours(run_id, run):
                with self._guarded(run_id, run):
                    self._advance(run_id, run)

    def _take_up_live_runs(self) -> None:
        self._runs = {run_id: LiveRun() for run_id in self._live_runs()}

    def _live_runs(self) -> set[str]:
        horizon = self._clock() - int(self._settings.forget_after_seconds * 1e9)
        table = tables.run.c
        with self._reader.connect() as connection:
            live = connection.scalars(
                sa.select(table.run_id).where(
                    table.status.not_in(("ended", "failed")), table.received_ns >= horizon
                )
            )
            return set(live)

    def _learn_of_runs(self) -> None:
        """Learn of runs whose batches other processes take: they may need a new owner."""
        try:
            live = self._live_runs()
        except sa.exc.SQLAlchemyError as error:
            log.info("live runs are not known now: %s", error)
            return
        long_ago = time.monotonic() - _ELSEWHERE_SECONDS
        with self._lock:
            for run_id in live:
                self._runs.setdefault(run_id, LiveRun())
            known = list(self._runs)
            over = [
                run_id
                for run_id, run in self._runs.items()
                if run.is_elsewhere and run_id not in live and run.last_news < long_ago
            ]
        for run_id in over:
            self.forget(run_id)
        for run_id in known:
            self._leases.hold(_lease_of(run_id), run_id)
        self._leases.take()

    def _is_ours(self, run_id: str, run: LiveRun) -> bool:
        """Return whether this process looks at a run."""
        lease = self._leases.hold(_lease_of(run_id), run_id)
        if lease is None or lease != run.lease:
            with self._lock:
                run.set_aside(lease)
        return lease is not None

    def _forget_silent_runs(self) -> None:
        now = time.monotonic()
        silent: list[str] = []
        over: dict[str, LiveRun] = {}
        with self._lock:
            for run_id, run in list(self._runs.items()):
                age = now - run.last_news
                if run.outcome.status in OVER and age > _OVER_SECONDS:
                    over[run_id] = run
                elif age > self._settings.forget_after_seconds:
                    silent.append(run_id)
        for run_id, run in over.items():  # it may be deleted meanwhile
            with self._guarded(run_id, run):
                self._writer.run(partial(forget, run_id=run_id), lock=of_run(run_id))
        for run_id in (*silent, *over):
            self.forget(run_id)

    def _look(self, run_id: str, run: LiveRun) -> None:
        began = time.monotonic()
        with self._lock:
            run.seeing_since = run.seeing_since or run.news_since
            run.news_since = None
        try:
            self._look_once(run_id, run, began)
        finally:
            self.num_looks += 1
            self.look_seconds += time.monotonic() - began

    def _look_once(self, run_id: str, run: LiveRun, began: float) -> None:
        with self._guarded(run_id, run):
            state = self._advance(run_id, run)
            self._adopt_made(run, state)
            behind = self._behind_seconds(run_id, run)
            look = state.look(self._clock() - int(behind * 1e9), behind, defers=True)
            self._make_deferred(run, state)
            outcome = run.outcome
            thinning = state.thinning_to_ask(self.shedding.wish(run_id))

            def work(unit: Any) -> Outcome | None:
                run.check(unit.connection)
                if find_deletion(unit.connection, run_id) is not None:
                    return None
                stored = store_look(unit, run_id, look, outcome)
                is_asked = thinning is not None and ask_to_thin(unit, run_id, thinning, behind)
                is_asked |= ask_of_the_slow(unit, run_id, stored.known or {})
                if ask_in_hangs(unit, run_id, stored.known or {}) or is_asked:
                    return dataclasses.replace(stored, changed=stored.changed | {"commands"})
                return stored

            stored = self._writer.run(work, lock=of_run(run_id), is_urgent=True)
            if stored is None:
                self.forget(run_id)
                return
            run.outcome, run.failure, run.looked = stored, "", began
            run.load = state.load(is_running=look.status == "running")
            if run.seeing_since is not None:
                lag = time.monotonic() - run.seeing_since
                self._lag_seconds, run.seeing_since = max(self._lag_seconds, lag), None
            if stored.changed:
                self._broker.publish(f"run:{run_id}", stored.changed, None)
                self._broker.publish("runs", {"runs"}, None)

    def _keep(self, run_id: str, run: LiveRun) -> None:
        if run.state is not None:
            run.keeper.store(
                run_id, run.state, run.last_batch, self._writer, self._reader, run.check
            )

    def _keep_due(self) -> None:
        """Store the states of runs of which much is new, while no look is due."""
        for run_id, run in list(self._runs.items()):
            if run.keeper.is_due and run.outcome.status not in OVER and not run.is_elsewhere:
                with self._guarded(run_id, run):
                    self._keep(run_id, run)

    def _keep_all(self) -> None:
        """Store the state of each live run before this process ends: the next one reads on."""
        for run_id, run in list(self._runs.items()):
            if run.keeper.is_worth_it and run.outcome.status not in OVER and not run.is_elsewhere:
                with self._guarded(run_id, run):
                    self._keep(run_id, run)

    @contextmanager
    def _guarded(self, run_id: str, run: LiveRun) -> Iterator[None]:
        """Let what fails cost the run an answer, and never the server."""
        try:
            yield
        except StoreUnavailableError as error:
            log.info("the findings of %s wait: %s", run_id, error)  # the writer warned
        except LeaseLostError as error:
            self._lost(run, error)
        except Exception as error:  # noqa: BLE001 - a detector must not stop the server
            self._failed(run_id, run, error)

    def _behind_seconds(self, run_id: str, run: LiveRun) -> float:
        """Return how far back the server's own delay keeps what is known of a run; 0 for a little.

        Silence of ranks is counted up to then only: what they sent since is on its way.
        """
        delay = self._intake.delay_seconds(run_id)
        if run.news_since is not None:
            delay = max(delay, time.monotonic() - run.news_since)
        return delay if delay > BEHIND_SECONDS else 0.0

    def _advance(self, run_id: str, run: LiveRun) -> RunState:
        if run.state is None:
            self._rebuild(run_id, run)
        state = run.state
        if state is None:
            raise RuntimeError("a rebuild was overtaken by new batches")
        newest, others = self._read_others(run_id, run, state)
        num_waiting = len(run.waiting)  # those that come meanwhile are for the next look
        while num_waiting > 0:
            with self._lock:
                taken = run.take(min(num_waiting, _BATCHES_AT_ONCE), newest)
            if not taken:
                break
            num_waiting -= len(taken)
            run.apply(state, [fed for fed in taken if fed.batch_id not in others])
        if others:
            run.last_batch = newest
            run.keeper.num_new += len(others)
        return state

    def _read_others(
        self, run_id: str, run: LiveRun, state: RunState
    ) -> tuple[int, frozenset[int]]:
        """Apply what other processes stored of a run; return the newest batch, and theirs."""
        if not self._leases.is_shared:
            return _ANY_BATCH, frozenset()
        with self._lock:
            ours = {fed.batch_id for fed in run.waiting}
        with self._reader.connect() as connection:
            newest, others, run.last_block = read_others(
                connection, run_id, state, run.last_batch, ours, run.last_block
            )
        if others:
            run.last_news = time.monotonic()
        return newest, others

    def _rebuild(self, run_id: str, run: LiveRun) -> None:
        state = RunState(run_id)
        with self._lock:
            # From here on batches wait in memory; those that the snapshot holds are skipped.
            run.state = state
        try:
            self._read_again(run_id, run, state)
        except StoreUnavailableError:
            run.state = None  # it may hold a part
            raise

    def _read_again(self, run_id: str, run: LiveRun, state: RunState) -> None:
        with self._reader.connect() as connection:
            run.last_block = newest_block(connection, run_id)
            known = run.keeper.find(connection, run_id)
            after = 0
            if known is not None:
                empty, (state, after) = state, known
                with self._lock:  # what is fed to it waits; unless it was given up meanwhile
                    run.state = state if run.state is empty else None
            run.last_batch = max(newest_batch(connection, run_id), after)
            state.earlier = earlier_runs(connection, run_id)
            state.usual_lines = usual_lines(connection, state.earlier)
            horizon = self._clock() - int(self._settings.replay_hours * 3600e9)
            run.keeper.num_new += replay(
                connection, run_id, state, run.last_batch, horizon, after=after
            )
            for line in notable_lines(connection, run_id):
                state.apply_record(line)

    def _failed(self, run_id: str, run: LiveRun, error: Exception) -> None:
        now = time.monotonic()
        text = f"{type(error).__name__}: {error}"
        if text != run.failure or now - run.failure_logged > FAILURE_LOG_SECONDS:
            run.failure, run.failure_logged = text, now
            log.error("the analysis of %s failed", run_id, exc_info=error)
        run.state = None  # what raised may have left it half changed: read it again
        run.keeper.may_read = False
        run.outcome = Outcome()  # the store will hold something else than the last look found

        def work(unit: Any) -> None:
            run.check(unit.connection)
            store_failure(unit, run_id, text)

        try:
            self._writer.run(work, lock=of_run(run_id))
        except LeaseLostError as lost:
            self._lost(run, lost)
            return
        except StoreUnavailableError as unavailable:
            log.warning("the failure of %s is not stored: %s", run_id, unavailable)
        self._broker.publish(f"run:{run_id}", {"verdict"}, None)

    def _lost(self, run: LiveRun, error: LeaseLostError) -> None:
        """Leave a run to its new owner: this process was stopped, or away from the database."""
        log.warning("%s; its findings of now are not written", error)
        with self._lock:
            run.set_aside(None)


def _lease_of(run_id: str) -> str:
    return f"analysis of {run_id}"
