"""Where each rank is and how it ended, sent past batches that wait.

Batches go out in the order they were made. Where many wait, for a server that does not keep up or
was away, the newest state of each rank and every end would come last of all: so they go first,
again and again, as batches of a producer of their own. They are in the batches that wait, too, so
that nothing rests on these: a state that comes twice counts once, and so does an end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from rankscope.node.upload.outbox import new_producer
from rankscope.wire import schema, zstd

MANY_WAITING = 3  # batches; fewer are on their way within seconds
EVERY_SECONDS = 5.0


class Vitals:
    """Written by the collector's thread, sent by the uploading one."""

    def __init__(self, run_id: str, host: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._run_id, self._host, self._clock = run_id, host, clock
        self._lock = threading.Lock()
        self._states: dict[tuple[int, int], schema.RankState] = {}
        self._ends: dict[tuple[int, int], schema.RankEnded] = {}
        self._producer, self._sequence = new_producer(host), 0
        self._next = 0.0

    def note(self, record: schema.Record) -> None:
        """Take a record, if it is one of these; of a rank the newest counts."""
        key = (record.attempt, record.rank)
        with self._lock:
            if isinstance(record, schema.RankState):
                self._states[key] = record
            elif isinstance(record, schema.RankEnded):
                self._ends[key] = record

    def due(self, num_waiting: int) -> bytes | None:
        """Return the batch to send now, where so many others wait; None if none is."""
        now = self._clock()
        if num_waiting < MANY_WAITING:
            with self._lock:  # the server has them, or they are on their way
                self._states.clear()
                self._ends.clear()
            return None
        if now < self._next:
            return None
        with self._lock:
            records = [*self._states.values(), *self._ends.values()]
        if not records:
            return None
        self._next = now + EVERY_SECONDS
        batch = schema.Batch(
            schema_version=schema.SCHEMA_VERSION,
            run_id=self._run_id,
            producer=self._producer,
            sequence=self._sequence + 1,
            host=self._host,
            sent_ns=time.time_ns(),
            records=[msgspec.Raw(schema.encode(record)) for record in records],
        )
        return zstd.pack(schema.encode(batch))

    def sent(self, *, is_accepted: bool) -> None:
        """Note what became of the batch: a number is never given to two."""
        if is_accepted:
            self._sequence += 1
        else:  # it may be stored, or not
            self._producer, self._sequence = new_producer(self._host), 0
