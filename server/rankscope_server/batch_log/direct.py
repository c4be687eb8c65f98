"""The log that is none: a batch is in the store before it is accepted."""

from __future__ import annotations

import asyncio

from rankscope_server.batch_log.interface import Appended, Origin, ReadBatch
from rankscope_server.batch_log.storing import OnStored, store_sent
from rankscope_server.batch_log.validating import Prepared, Validator
from rankscope_server.problems import Problem
from rankscope_server.store.batches import Stored
from rankscope_server.store.locks import of_run
from rankscope_server.store.unit import Unit
from rankscope_server.store.writer import Writer


class DirectLog:
    """Validates and commits."""

    def __init__(self, validator: Validator, writer: Writer, on_stored: OnStored) -> None:
        self._validator, self._writer, self._on_stored = validator, writer, on_stored

    async def read(
        self, body: bytes, encoding: str, *, takes_commands: bool, is_urgent: bool = False
    ) -> Prepared:
        """Validate a body. Raises Problem, StoreUnavailableError."""
        return await asyncio.wrap_future(
            self._validator.submit(
                body, encoding, takes_commands=takes_commands, is_urgent=is_urgent
            )
        )

    async def append(self, batch: ReadBatch, origin: Origin) -> Appended:
        """Store a batch; return once it is durable. Raises Problem, StoreUnavailableError."""
        prepared = batch
        assert isinstance(prepared, Prepared)
        valid = prepared.batch

        def work(unit: Unit) -> Stored | Problem:
            return store_sent(unit, prepared, origin.project)

        def after_commit(stored: Stored | Problem) -> None:
            if isinstance(stored, Stored):
                self._on_stored(valid, stored)

        done = self._writer.submit(
            work,
            after_commit,
            lock=of_run(valid.run_id),
            is_urgent=origin.is_urgent,
            announce=lambda unit: unit.run(valid.run_id).want(valid),
        )
        stored = await asyncio.wrap_future(done)
        if isinstance(stored, Problem):
            raise stored
        return Appended(stored.duplicate, refused=valid.refused, commands=stored.commands)

    def failure(self) -> str:
        """Return nothing: whether the store can be written is asked of the store."""
        return ""
