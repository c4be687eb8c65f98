"""Stores one batch as its sender may: what every way into the store ends with."""

from __future__ import annotations

from collections.abc import Callable

from rankscope_server.batch_log.validating import Prepared
from rankscope_server.ingest.batch import ValidatedBatch
from rankscope_server.problems import Problem
from rankscope_server.store.batches import Stored, store_batch
from rankscope_server.store.deletion import deletion_in, gone
from rankscope_server.store.projects import claim_run, not_ours
from rankscope_server.store.unit import Unit

OnStored = Callable[[ValidatedBatch, Stored], None]  # after the commit


def store_sent(unit: Unit, prepared: Prepared, project: str | None) -> Stored | Problem:
    """Store a batch, or return why it is refused for good. A new run becomes the project's."""
    batch = prepared.batch
    if (deleted := deletion_in(unit, batch.run_id)) is not None:
        return gone(deleted)
    if project is not None and not claim_run(unit.connection, batch.run_id, project):
        return not_ours(batch.run_id)
    return store_batch(unit, batch, prepared.journal)
