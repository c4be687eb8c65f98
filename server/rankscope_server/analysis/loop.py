"""Looks at every live run once a second and keeps the store in step with what it sees.

One thread owns all run states, so they need no lock. A run enters memory with its first batch
and is then rebuilt from the store: a restarted server knows what it knew before. A look that
fails costs its run an answer, never the server.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from rankscope.wire.chunk import decode_chunk
from rankscope.wire.schema import AnyRecord, Chunk
from rankscope_server.analysis.asking import ask_in_hangs, ask_of_the_slow, ask_to_thin
from rankscope_server.analysis.baselines import earlier_runs
from rankscope_server.analysis.notable_lines import notable_lines, usual_lines
from rankscope_server.analysis.state import RunState
from rankscope_server.analysis.stored_findings import Outcome, store_failure, store_look
from rankscope_server.broker import Broker
from rankscope_server.ingest.chunks import ValidatedChunk
from rankscope_server.ingest.intake import Intake
from rankscope_server.settings import Settings
from rankscope_server.store import tables
from rankscope_server.store.deletion import find_deletion
from rankscope_server.store.engine import StoreUnavailableError
from rankscope_server.store.restart import newest_batch, replay
from rankscope_server.store.writer import Writer

log = logging.getLogger(__name__)
# What waits in memory for a look at a run. Beyond the first bound chunks wait as they came, and are
# decoded when it is their turn; beyond the second the run is read again from the store.
MAX_WAITING_EVENTS = 1_000_000  # some 180 MB of columns
MAX_WAITING_BYTES = 256 << 20
FAILURE_LOG_SECONDS = 60.0
_MAX_PAUSE_SECONDS = 2.0
BEHIND_SECONDS = 3.0  # a delay of less is no news: looks are a second apart
_BYTES_PER_RECORD = 1_000  # about what a decoded one takes


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
    last_batch: int = 0
    last_news: float = field(default_factory=time.monotonic)
    looked: float = 0.0  # when the newest look that was stored began
    news_since: float | None = None  # first batch that came after that look began
    seeing_since: float | None = None  # the same of the look that is under way
    outcome: Outcome = field(default_factory=Outcome)
    failure: str = ""
    failure_logged: float = 0.0


class AnalysisLoop:
    """Owns the run states. `feed` from any thread; `start` and `close` once."""

    def __init__(
        self,
        settings: Settings,
        writer: Writer,
        reader: sa.Engine,
        broker: Broker,
        clock: Callable[[], int] = time.time_ns,
        intake: Intake | None = None,
    ) -> None:
        self._settings, self._writer, self._reader = settings, writer, reader
        self._broker, self._clock = broker, clock
        self._intake = intake or Intake()
        self._lock = threading.Lock()
        self._runs: dict[str, LiveRun] = {}
        self.num_looks, self.look_seconds = 0, 0.0
        self._looked = time.monotonic()  # when the loop went through all runs last
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="rankscope-analysis", daemon=True)

    def start(self) -> None:
        """Take up the runs that were live when the server ended, and begin to look."""
        self._take_up_live_runs()
        self._thread.start()

    def close(self, timeout_seconds: float = 10.0) -> None:
        """Stop looking; a look that is under way is waited for, as it uses the store."""
        self._stop.set()
        self._thread.join(timeout_seconds)

    @property
    def num_runs(self) -> int:
        """Return how many runs are in memory."""
        return len(self._runs)

    @property
    def is_alive(self) -> bool:
        """Return whether its thread works."""
        return self._thread.is_alive()

    @property
    def num_behind(self) -> int:
        """Return how many of them have stored batches that no look has seen yet."""
        return sum(run.last_news >= run.looked for run in list(self._runs.values()))

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
        """Return for how long stored batches wait for a look, or the loop itself for its turn."""
        stuck = time.monotonic() - self._looked - self._settings.look_seconds
        return max(self.lag_seconds, stuck, 0.0)

    def feed(
        self, run_id: str, batch_id: int, records: list[AnyRecord], chunks: list[ValidatedChunk]
    ) -> None:
        """Hand over a batch that is durable."""
        with self._lock:
            run = self._runs.setdefault(run_id, LiveRun())
            run.last_news = time.monotonic()
            run.news_since = run.news_since or run.last_news
            if run.state is None and not run.waiting:
                # The store holds this batch already; the rebuild will read it from there.
                return
            num_events = sum(part.chunk.count for part in chunks)
            fed = Fed(batch_id, records, chunks, num_events, sum(len(p.chunk.data) for p in chunks))
            if run.waiting_events + num_events > MAX_WAITING_EVENTS:
                fed.chunks, fed.num_events = [part.chunk for part in chunks], 0
            run.waiting.append(fed)
            run.waiting_events += fed.num_events
            run.waiting_bytes += fed.num_bytes + _BYTES_PER_RECORD * len(records)
            if run.waiting_bytes > MAX_WAITING_BYTES:
                run.state = None
                run.waiting.clear()
                run.waiting_events = run.waiting_bytes = 0

    def forget(self, run_id: str) -> None:
        """Let a run that was deleted leave memory."""
        with self._lock:
            self._runs.pop(run_id, None)

    def look_now(self) -> None:
        """Look once at every live run; for tests and for the thread."""
        for run_id in list(self._runs):
            if self._stop.is_set():
                return
            if (run := self._runs.get(run_id)) is not None:  # else it was deleted meanwhile
                self._look(run_id, run)
        self._forget_silent_runs()
        self._looked = time.monotonic()

    def _work(self) -> None:
        pause = self._settings.look_seconds
        while not self._stop.wait(pause):
            began = time.monotonic()
            self.look_now()
            # Looks take a fifth of the time, while findings stay a few seconds young.
            pause = min(4.0 * (time.monotonic() - began), _MAX_PAUSE_SECONDS)
            pause = max(pause, self._settings.look_seconds)

    def _take_up_live_runs(self) -> None:
        horizon = self._clock() - int(self._settings.forget_after_seconds * 1e9)
        table = tables.run.c
        with self._reader.connect() as connection:
            live = connection.scalars(
                sa.select(table.run_id).where(
                    table.status.not_in(("ended", "failed")), table.received_ns >= horizon
                )
            )
            self._runs = {run_id: LiveRun() for run_id in live}

    def _forget_silent_runs(self) -> None:
        now = time.monotonic()
        with self._lock:
            for run_id, run in list(self._runs.items()):
                age = now - run.last_news
                over = run.outcome.status in {"ended", "failed"} and age > 60
                if over or age > self._settings.forget_after_seconds:
                    del self._runs[run_id]

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
        try:
            state = self._advance(run_id, run)
            behind = self._behind_seconds(run)
            look = state.look(self._clock() - int(behind * 1e9), behind)
            outcome, level = run.outcome, state.thinning_to_ask()

            def work(unit: Any) -> Outcome:
                if find_deletion(unit.connection, run_id) is not None:
                    return dataclasses.replace(outcome, changed=frozenset())
                stored = store_look(unit, run_id, look, outcome)
                is_asked = level is not None and ask_to_thin(unit, run_id, level)
                is_asked |= ask_of_the_slow(unit, run_id, stored.known or {})
                if ask_in_hangs(unit, run_id, stored.known or {}) or is_asked:
                    return dataclasses.replace(stored, changed=stored.changed | {"commands"})
                return stored

            run.outcome, run.failure, run.looked = self._writer.run(work), "", began
            run.seeing_since = None
        except StoreUnavailableError as error:
            log.info("the findings of %s wait: %s", run_id, error)  # the writer warned
            return
        except Exception as error:  # noqa: BLE001 - a detector must not stop the server
            self._failed(run_id, run, error)
            return
        if run.outcome.changed:
            self._broker.publish(f"run:{run_id}", run.outcome.changed, None)
            self._broker.publish("runs", {"runs"}, None)

    def _behind_seconds(self, run: LiveRun) -> float:
        """Return how far back the server's own delay keeps what is known of a run; 0 for a little.

        Silence of ranks is counted up to then only: what they sent since is on its way.
        """
        delay = self._intake.delay_seconds()
        if run.news_since is not None:
            delay = max(delay, time.monotonic() - run.news_since)
        return delay if delay > BEHIND_SECONDS else 0.0

    def _advance(self, run_id: str, run: LiveRun) -> RunState:
        if run.state is None:
            self._rebuild(run_id, run)
        state = run.state
        if state is None:
            raise RuntimeError("a rebuild was overtaken by new batches")
        for _ in range(len(run.waiting)):  # those that come meanwhile are for the next look
            with self._lock:
                if not run.waiting:
                    break
                fed = run.waiting.popleft()
                run.waiting_events -= fed.num_events
                run.waiting_bytes -= fed.num_bytes + _BYTES_PER_RECORD * len(fed.records)
            if fed.batch_id <= run.last_batch:
                continue
            for record in fed.records:
                state.apply_record(record)
            for part in fed.chunks:
                if isinstance(part, Chunk):
                    state.apply_chunk(part, decode_chunk(part.data))
                else:
                    state.apply_chunk(part.chunk, part.columns, part.calls)
            run.last_batch = fed.batch_id
        return state

    def _rebuild(self, run_id: str, run: LiveRun) -> None:
        state = RunState(run_id)
        with self._lock:
            # From here on batches wait in memory; those that the snapshot holds are skipped.
            run.state = state
        with self._reader.connect() as connection:
            run.last_batch = newest_batch(connection, run_id)
            state.earlier = earlier_runs(connection, run_id)
            state.usual_lines = usual_lines(connection, state.earlier)
            horizon = self._clock() - int(self._settings.replay_hours * 3600e9)
            replay(connection, run_id, state, run.last_batch, horizon)
            for line in notable_lines(connection, run_id):
                state.apply_record(line)

    def _failed(self, run_id: str, run: LiveRun, error: Exception) -> None:
        now = time.monotonic()
        text = f"{type(error).__name__}: {error}"
        if text != run.failure or now - run.failure_logged > FAILURE_LOG_SECONDS:
            run.failure, run.failure_logged = text, now
            log.error("the analysis of %s failed", run_id, exc_info=error)
        run.state = None  # what raised may have left it half changed: read it again
        run.outcome = Outcome()  # the store will hold something else than the last look found

        def work(unit: Any) -> None:
            store_failure(unit, run_id, text)

        try:
            self._writer.run(work)
        except StoreUnavailableError as unavailable:
            log.warning("the failure of %s is not stored: %s", run_id, unavailable)
        self._broker.publish(f"run:{run_id}", {"verdict"}, None)
