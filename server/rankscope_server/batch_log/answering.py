"""What a gateway asks the store for the answer to a batch, not with every one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import sqlalchemy as sa
from starlette.concurrency import run_in_threadpool

from rankscope.wire.schema import Command
from rankscope_server.ingest.batch import ReadBatch
from rankscope_server.ingest.records import validate_records
from rankscope_server.store import tables
from rankscope_server.store.commands import hand_out
from rankscope_server.store.deletion import find_deletion, gone
from rankscope_server.store.locks import of_run
from rankscope_server.store.writer import Writer

_FRESH_SECONDS = 1.0
_MOST_ENTRIES = 10_000
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Fresh(Generic[K, V]):
    """Values that were read a moment ago; from any thread."""

    def __init__(self, read: Callable[[K], V], clock: Callable[[], float] = time.monotonic) -> None:
        self._read, self._clock = read, clock
        self._known: dict[K, tuple[float, V]] = {}

    def known(self, key: K) -> V | None:
        """Return a value that is fresh; None where none is."""
        at, value = self._known.get(key, (float("-inf"), None))
        return value if self._clock() - at < _FRESH_SECONDS else None

    def get(self, key: K) -> V:
        """Return a value, read now where it is not fresh."""
        value = self.known(key)
        if value is None:
            value = self._read(key)
            if len(self._known) >= _MOST_ENTRIES:
                self._known.clear()
            self._known[key] = (self._clock(), value)
        return value


class Answering:
    """Whether a run takes batches, and what is asked of its ranks."""

    def __init__(self, reader: sa.Engine, writer: Writer) -> None:
        self._reader, self._writer = reader, writer
        self._state = Fresh(self._read)

    async def check(self, run_id: str) -> None:
        """Raise Problem 410 where the run was deleted."""
        if self._state.known(run_id) is None:
            await run_in_threadpool(self._state.get, run_id)
        is_deleted, _ = self._state.get(run_id)
        if is_deleted:
            with self._reader.connect() as connection:
                deleted = find_deletion(connection, run_id)
            if deleted is not None:
                raise gone(deleted)

    async def commands(self, run_id: str, batch: ReadBatch) -> list[Command]:
        """Return what is asked of the ranks whose states a batch brings, and note it."""
        _, has_commands = self._state.get(run_id)
        if not has_commands:
            return []
        return await run_in_threadpool(self._hand_out, run_id, batch)

    def _hand_out(self, run_id: str, batch: ReadBatch) -> list[Command]:
        records, _ = validate_records(batch.envelope.records)
        return self._writer.run(lambda unit: hand_out(unit, run_id, records), lock=of_run(run_id))

    def _read(self, run_id: str) -> tuple[bool, bool]:
        command = tables.command.c
        asked = sa.select(command.id).where(
            command.run_id == run_id, command.expires_ns > time.time_ns()
        )
        with self._reader.connect() as connection:
            is_deleted = find_deletion(connection, run_id) is not None
            return is_deleted, connection.scalar(asked.limit(1)) is not None
