"""Stores one batch: everything of it in one transaction, together with its sequence number."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import sqlalchemy as sa

from rankscope.wire import schema
from rankscope.wire.chunk import RANK
from rankscope.wire.sample_columns import SAMPLE_KINDS
from rankscope.wire.schema import AnyRecord
from rankscope_server.ingest.batch import ValidatedBatch
from rankscope_server.ingest.chunks import ValidatedChunk
from rankscope_server.ingest.step_metrics import known_to_host
from rankscope_server.store import tables
from rankscope_server.store.blobs import blobs_of
from rankscope_server.store.commands import hand_out
from rankscope_server.store.packing import pack
from rankscope_server.store.records import store_records
from rankscope_server.store.unit import Unit

# Not in the journal of a batch: logs are stored in their blocks, of states only the newest counts.
_NOT_JOURNALLED = frozenset({schema.LogLine, schema.RankState})
# Of the rest, what goes by age, by its kind for retention; but for events that last.
_AGEING: dict[type[schema.Record], str] = {
    schema.Event: "events", schema.Stacks: "events", schema.Metrics: "numbers",
}  # fmt: skip
_LASTING = schema.LASTING_EVENTS
_encode = msgspec.msgpack.Encoder().encode
_INSERT_BATCH = sa.insert(tables.batch)
_INSERT_JOURNAL = sa.insert(tables.journal)


class Journal(NamedTuple):
    """Packed records of a batch: those that stay with their run, and by kind those that age."""

    lasting: bytes | None
    ageing: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Stored:
    """What came of a batch."""

    duplicate: bool
    batch_id: int = 0
    changed: frozenset[str] = field(default_factory=frozenset)
    step: int = 0
    commands: list[schema.Command] = field(default_factory=list)


def pack_journal(records: list[AnyRecord]) -> Journal:
    """Return the records that a restarted server replays, packed.

    Those that age have their places among all of them beside them: they are replayed as they came.
    """
    journalled = [record for record in records if type(record) not in _NOT_JOURNALLED]
    lasting: list[AnyRecord] = []
    ageing: dict[str, tuple[list[int], list[AnyRecord]]] = {}
    for place, record in enumerate(journalled):
        kind = _AGEING.get(type(record))
        if kind is None or (isinstance(record, schema.Event) and record.name in _LASTING):
            lasting.append(record)
        else:
            places, part = ageing.setdefault(kind, ([], []))
            places.append(place)
            part.append(record)
    packed = {kind: pack(_encode(part)) for kind, part in ageing.items()}
    return Journal(pack(_encode(lasting)) if lasting else None, packed)


def store_batch(unit: Unit, batch: ValidatedBatch, journal: Journal) -> Stored:
    """Store a batch with its journal, or find that it was stored before.

    Raises StoreUnavailableError while the data of chunks cannot be kept.
    """
    run = unit.run(batch.run_id)
    if run.is_stored(batch):
        return Stored(duplicate=True)
    if batch.chunks:
        blobs_of(unit.connection).admit()
    producer_id = run.producer(batch)
    inserted = unit.connection.execute(
        _INSERT_BATCH,
        {
            "producer_id": producer_id, "sequence": batch.sequence, "run_id": batch.run_id,
            "received_ns": unit.now_ns, "records": journal.lasting,
        },
    )  # fmt: skip
    batch_id = int(inserted.inserted_primary_key[0])  # type: ignore[index]
    if journal.ageing:
        rows = [
            {"batch_id": batch_id, "kind": kind, "run_id": batch.run_id, "records": records}
            for kind, records in journal.ageing.items()
        ]
        unit.connection.execute(_INSERT_JOURNAL, rows)
    run.ranks.load(batch.ranks())
    changed, num_lines = store_records(unit, batch, (producer_id, batch_id), run.ranks)
    changed |= _store_chunks(unit, batch, batch_id)
    run.add(batch, producer_id, num_lines)
    commands = hand_out(unit, batch.run_id, batch.records) if batch.takes_commands else []
    if commands:
        changed.add("commands")
    return Stored(False, batch_id, frozenset(changed), run.ranks.step, commands)


def _store_chunks(unit: Unit, batch: ValidatedBatch, batch_id: int) -> set[str]:
    changed: set[str] = set()
    run = unit.run(batch.run_id)
    ranks = run.ranks
    for validated in batch.chunks:
        chunk = validated.chunk
        run.add_chunk(validated, batch_id)
        _store_steps(unit, batch.run_id, validated)
        if validated.durations is not None:
            unit.operations.add(batch.run_id, chunk.attempt, validated.durations)
        if chunk.rank >= 0:
            for span in validated.spans():
                ranks.seen_in(chunk.attempt, span, chunk.host)
        changed.add("samples" if chunk.kind in SAMPLE_KINDS else chunk.kind)
    return changed


def _store_steps(unit: Unit, run_id: str, validated: ValidatedChunk) -> None:
    """Put the steps of a chunk into their tiles; of a rank on a device what its host knows."""
    if validated.steps is None or validated.values is None:
        return
    attempt, ranks = validated.chunk.attempt, unit.run(run_id).ranks
    if not any(ranks.is_on_device(attempt, rank) for rank in validated.ranks):
        of_events = validated.columns.get(RANK, validated.chunk.rank)
        unit.tiles.add(run_id, attempt, of_events, validated.steps, validated.values)
        return
    for rank, events in validated.events_of_ranks():
        values = {name: cells[events] for name, cells in validated.values.items()}
        if ranks.is_on_device(attempt, rank):
            values = known_to_host(values)
        unit.tiles.add(run_id, attempt, rank, validated.steps[events], values)
