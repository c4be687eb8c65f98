"""The one thread that validates: batches that come at about the same time are validated together.

That takes two thirds of the time of one after the other. A batch that comes while few others are
under way waits for none.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from rankscope_server.batch_log.interface import Head
from rankscope_server.ingest.batch import ReadBatch, ValidatedBatch, read_batch, validate_batches
from rankscope_server.problems import Problem
from rankscope_server.store.batches import Journal, pack_journal
from rankscope_server.store.engine import StoreUnavailableError

_PERIOD_SECONDS = 0.1  # from one group to the next, where many batches are under way
_MANY = 4
_MOST_BATCHES = 64  # of a group
_URGENT, _BULK, _LAST = range(3)  # in this order what waits is validated
_MOST_BYTES, _MOST_EVENTS = 4 << 20, 200_000  # of batches that are unpacked at once


class Prepared(NamedTuple):
    """A batch that can be stored as it is."""

    batch: ValidatedBatch
    journal: Journal

    @property
    def head(self) -> Head:
        """Return what it is."""
        batch = self.batch
        num_events = sum(part.chunk.count for part in batch.chunks)
        return Head(
            batch.run_id, batch.producer, batch.sequence, batch.sent_ns, len(batch.records),
            len(batch.chunks), num_events,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Body:
    """What came, and who waits for it."""

    data: bytes
    encoding: str
    takes_commands: bool
    future: Future[Prepared] = field(default_factory=Future)


class Validator:
    """Turns bodies into batches. `start` before the first `submit`, `close` at the end.

    One thread: more would only take the interpreter from each other.
    """

    def __init__(self, max_unpacked_bytes: int, num_under_way: Callable[[], int]) -> None:
        self._max_unpacked_bytes, self._num_under_way = max_unpacked_bytes, num_under_way
        self._queue: queue.PriorityQueue[tuple[int, int, _Body | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._work, name="rankscope-validate", daemon=True)
        self._began = 0.0  # the newest group
        self._closed = False

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def submit(
        self, data: bytes, encoding: str, *, takes_commands: bool, is_urgent: bool = False
    ) -> Future[Prepared]:
        """Queue a body; its future raises Problem where it is not a batch at all.

        What is urgent goes past what is not. Raises StoreUnavailableError where the server ends.
        """
        if self._closed:
            raise StoreUnavailableError(
                "the server is stopping", "send again to the next server", cause="stopping"
            )
        body = _Body(data, encoding, takes_commands)
        self._queue.put((_URGENT if is_urgent else _BULK, next(self._numbers), body))
        return body.future

    def close(self, timeout_seconds: float = 3.0) -> None:
        """Finish what was queued, then stop."""
        self._closed = True
        self._queue.put((_LAST, next(self._numbers), None))
        self._thread.join(timeout_seconds)

    def _work(self) -> None:
        is_last = False
        while not is_last:
            (_, _, body), group = self._queue.get(), []
            while body is not None:
                group.append(body)
                if len(group) == _MOST_BATCHES:
                    break
                try:
                    _, _, body = self._queue.get(timeout=self._pause())
                except queue.Empty:
                    break
            is_last = body is None
            self._began = time.monotonic()
            self._take(group)

    def _pause(self) -> float:
        """Return how many seconds to wait for one more batch of a group."""
        if self._num_under_way() <= _MANY:
            return 0.0
        return max(0.0, self._began + _PERIOD_SECONDS - time.monotonic())

    def _take(self, group: list[_Body]) -> None:
        """Validate bodies, no more of them together than memory should hold."""
        ready: list[tuple[_Body, ReadBatch]] = []
        num_bytes = num_events = 0
        for body in group:
            if not body.future.set_running_or_notify_cancel():  # its sender went away
                continue
            try:
                batch = read_batch(
                    body.data, body.encoding, self._max_unpacked_bytes, body.takes_commands
                )
            except Problem as problem:
                # Their frames hold what was unpacked, and many may wait to be answered.
                problem.__traceback__ = problem.__cause__ = problem.__context__ = None
                body.future.set_exception(problem)
                continue
            except Exception as error:  # noqa: BLE001 - a defect of ours: it belongs to who sent it
                body.future.set_exception(error)
                continue
            ready.append((body, batch))
            num_bytes += batch.unpacked_bytes
            num_events += batch.chunks.num_events
            if num_bytes > _MOST_BYTES or num_events > _MOST_EVENTS:
                self._validate(ready)
                ready, num_bytes, num_events = [], 0, 0
        self._validate(ready)

    def _validate(self, ready: list[tuple[_Body, ReadBatch]]) -> None:
        try:
            batches = validate_batches([batch for _, batch in ready])
            prepared = [Prepared(batch, pack_journal(batch.records)) for batch in batches]
        except Exception as error:  # noqa: BLE001 - a defect of ours: it belongs to who sent it
            if len(ready) == 1:
                ready[0][0].future.set_exception(error)
                return
            for body, _ in ready:
                again = read_batch(
                    body.data, body.encoding, self._max_unpacked_bytes, body.takes_commands
                )
                self._validate([(body, again)])
            return
        for (body, _), done in zip(ready, prepared, strict=True):
            body.future.set_result(done)
