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

from rankscope.wire.schema import AnyRecord
from rankscope_server.analysis.asking import ask_in_hangs, ask_of_the_slow, ask_to_thin
from rankscope_server.analysis.baselines import earlier_runs
from rankscope_server.analysis.notable_lines import notable_lines, usual_lines
from rankscope_server.analysis.state import RunState
from rankscope_server.analysis.stored_findings import Outcome, store_failure, store_look
from rankscope_server.broker import Broker
from rankscope_server.ingest.chunks import ValidatedChunk
from rankscope_server.settings import Settings
from rankscope_server.store import tables
from rankscope_server.store.engine import StoreUnavailableError
from rankscope_server.store.restart import newest_batch, replay
from rankscope_server.store.writer import Writer

log = logging.getLogger(__name__)
MAX_WAITING = 20_000  # events in memory for a run; beyond, the run is read again from the store
FAILURE_LOG_SECONDS = 60.0


@dataclass(slots=True)
class Fed:
    """A stored batch on its way into the analysis."""

    batch_id: int
    records: list[AnyRecord]
    chunks: list[ValidatedChunk]


@dataclass(slots=True)
class LiveRun:
    """What memory holds of a run."""

    state: RunState | None = None
    waiting: deque[Fed] = field(default_factory=deque)
    last_batch: int = 0
    last_news: float = field(default_factory=time.monotonic)
    since: float = field(default_factory=time.monotonic)
    looked: float = 0.0  # when the newest look that was stored began
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
    ) -> None:
        self._settings, self._writer, self._reader = settings, writer, reader
        self._broker, self._clock = broker, clock
        self._lock = threading.Lock()
        self._runs: dict[str, LiveRun] = {}
        self._looked = time.monotonic()  # when the loop went through all runs last
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="rankscope-analysis", daemon=True)

    def start(self) -> None:
        """Take up the runs that were live when the server ended, and begin to look."""
        self._take_up_live_runs()
        self._thread.start()

    def close(self, timeout_seconds: float = 2.0) -> None:
        """Stop looking."""
        self._stop.set()
        self._thread.join(timeout_seconds)

    @property
    def num_runs(self) -> int:
        """Return how many runs are in memory."""
        return len(self._runs)

    @property
    def num_behind(self) -> int:
        """Return how many of them have stored batches that no look has seen yet."""
        return sum(run.last_news >= run.looked for run in list(self._runs.values()))

    @property
    def behind_seconds(self) -> float:
        """Return for how long stored batches wait for a look: of the worst run, or of the loop."""
        now, runs = time.monotonic(), list(self._runs.values())
        waits = [now - max(run.looked, run.since) for run in runs if run.last_news >= run.looked]
        return max([*waits, now - self._looked - self._settings.look_seconds, 0.0])

    def feed(
        self, run_id: str, batch_id: int, records: list[AnyRecord], chunks: list[ValidatedChunk]
    ) -> None:
        """Hand over a batch that is durable."""
        with self._lock:
            run = self._runs.setdefault(run_id, LiveRun())
            run.last_news = time.monotonic()
            if run.state is None and not run.waiting:
                # The store holds this batch already; the rebuild will read it from there.
                return
            run.waiting.append(Fed(batch_id, records, chunks))
            if len(run.waiting) > MAX_WAITING:
                run.state = None
                run.waiting.clear()

    def look_now(self) -> None:
        """Look once at every live run; for tests and for the thread."""
        for run_id in list(self._runs):
            if self._stop.is_set():
                return
            self._look(run_id, self._runs[run_id])
        self._forget_silent_runs()
        self._looked = time.monotonic()

    def _work(self) -> None:
        while not self._stop.wait(self._settings.look_seconds):
            self.look_now()

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
        try:
            state = self._advance(run_id, run)
            look = state.look(self._clock())
            outcome, level = run.outcome, state.thinning_to_ask()

            def work(unit: Any) -> Outcome:
                stored = store_look(unit, run_id, look, outcome)
                is_asked = level is not None and ask_to_thin(unit, run_id, level)
                is_asked |= ask_of_the_slow(unit, run_id, stored.known or {})
                if ask_in_hangs(unit, run_id, stored.known or {}) or is_asked:
                    return dataclasses.replace(stored, changed=stored.changed | {"commands"})
                return stored

            run.outcome, run.failure, run.looked = self._writer.run(work), "", began
        except StoreUnavailableError as error:
            log.warning("the findings of %s wait: %s", run_id, error)
            return
        except Exception as error:  # noqa: BLE001 - a detector must not stop the server
            self._failed(run_id, run, error)
            return
        if run.outcome.changed:
            self._broker.publish(f"run:{run_id}", run.outcome.changed, None)
            self._broker.publish("runs", {"runs"}, None)

    def _advance(self, run_id: str, run: LiveRun) -> RunState:
        if run.state is None:
            self._rebuild(run_id, run)
        state = run.state
        if state is None:
            raise RuntimeError("a rebuild was overtaken by new batches")
        while True:
            with self._lock:
                if not run.waiting:
                    return state
                fed = run.waiting.popleft()
            if fed.batch_id <= run.last_batch:
                continue
            for record in fed.records:
                state.apply_record(record)
            for validated in fed.chunks:
                state.apply_chunk(validated.chunk, validated.columns)
            run.last_batch = fed.batch_id

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
