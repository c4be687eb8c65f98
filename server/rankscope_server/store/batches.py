"""Stores one batch: everything of it in one transaction, together with its sequence number."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import msgspec
import sqlalchemy as sa

from rankscope.wire import schema
from rankscope.wire.sample_columns import SAMPLE_KINDS
from rankscope.wire.schema import AnyRecord
from rankscope_server.ingest.batch import ValidatedBatch
from rankscope_server.ingest.step_metrics import known_to_host
from rankscope_server.store import tables
from rankscope_server.store.commands import hand_out
from rankscope_server.store.packing import pack
from rankscope_server.store.ranks import RankRows
from rankscope_server.store.records import store_records
from rankscope_server.store.spans import add_spans
from rankscope_server.store.unit import Unit

# Not in the journal of a batch: logs are stored in their blocks, of states only the newest counts.
_NOT_JOURNALLED = (schema.LogLine, schema.RankState)
_encode = msgspec.msgpack.Encoder().encode
# Built once: to build a statement costs more than to run it.
_SELECT_BATCH = sa.select(tables.batch.c.id).where(
    tables.batch.c.producer_id == sa.bindparam("producer_id"),
    tables.batch.c.sequence == sa.bindparam("sequence"),
)
_SELECT_PRODUCER = sa.select(tables.producer.c.id).where(
    tables.producer.c.run_id == sa.bindparam("run_id"),
    tables.producer.c.producer == sa.bindparam("producer"),
)


@dataclass(frozen=True, slots=True)
class Stored:
    """What came of a batch."""

    duplicate: bool
    batch_id: int = 0
    changed: frozenset[str] = field(default_factory=frozenset)
    step: int = 0
    commands: list[schema.Command] = field(default_factory=list)


def pack_journal(records: list[AnyRecord]) -> bytes | None:
    """Return the records that a restarted server replays, packed."""
    records = [record for record in records if not isinstance(record, _NOT_JOURNALLED)]
    return pack(_encode(records)) if records else None


def store_batch(unit: Unit, batch: ValidatedBatch, journal: bytes | None) -> Stored:
    """Store a batch with its journal, or find that it was stored before."""
    connection = unit.connection
    producer_id = _producer(connection, batch)
    known = connection.scalar(
        _SELECT_BATCH, {"producer_id": producer_id, "sequence": batch.sequence}
    )
    if known is not None:
        return Stored(duplicate=True)
    inserted = connection.execute(
        sa.insert(tables.batch).values(
            producer_id=producer_id,
            sequence=batch.sequence,
            run_id=batch.run_id,
            received_ns=unit.now_ns,
            records=journal,
        )
    )
    batch_id = int(inserted.inserted_primary_key[0])  # type: ignore[index]
    ranks = RankRows(connection, batch.run_id, unit.now_ns)
    ranks.load(
        {(record.attempt, record.rank) for record in batch.records if record.rank >= 0}
        | {(validated.chunk.attempt, validated.chunk.rank) for validated in batch.chunks}
    )
    changed, num_lines = store_records(unit, batch, producer_id, ranks)
    changed |= _store_chunks(unit, batch, batch_id, ranks)
    ranks.flush()
    _update_run(unit, batch, ranks, num_lines)
    _update_producer(unit, batch, producer_id)
    commands = hand_out(unit, batch.run_id, batch.records) if batch.takes_commands else []
    if commands:
        changed.add("commands")
    return Stored(False, batch_id, frozenset(changed), ranks.step, commands)


def _producer(connection: sa.Connection, batch: ValidatedBatch) -> int:
    table = tables.producer
    known = connection.scalar(
        _SELECT_PRODUCER, {"run_id": batch.run_id, "producer": batch.producer}
    )
    if known is not None:
        return int(known)
    inserted = connection.execute(
        sa.insert(table).values(
            run_id=batch.run_id,
            producer=batch.producer,
            host=batch.host,
            first_sequence=batch.sequence,
        )
    )
    return int(inserted.inserted_primary_key[0])  # type: ignore[index]


def _update_producer(unit: Unit, batch: ValidatedBatch, producer_id: int) -> None:
    table = tables.producer.c
    last = sa.case(
        (table.last_sequence > batch.sequence, table.last_sequence), else_=batch.sequence
    )
    unit.connection.execute(
        sa.update(tables.producer)
        .where(table.id == producer_id)
        .values(
            last_sequence=last,
            received=table.received + 1,
            # an earlier one may come later: then those between are missing
            first_sequence=sa.case(
                (table.first_sequence < batch.sequence, table.first_sequence),
                else_=batch.sequence,
            ),
            refused=table.refused + len(batch.refused),
            bytes=table.bytes + batch.num_bytes,
            received_ns=unit.now_ns,
        )
    )


def _store_chunks(unit: Unit, batch: ValidatedBatch, batch_id: int, ranks: RankRows) -> set[str]:
    changed: set[str] = set()
    rows = []
    for validated in batch.chunks:
        chunk = validated.chunk
        rows.append(
            {
                "run_id": batch.run_id, "batch_id": batch_id, "kind": chunk.kind,
                "attempt": chunk.attempt, "rank": chunk.rank, "host": chunk.host,
                "step_lo": chunk.step_lo, "step_hi": chunk.step_hi, "count": chunk.count,
                "time_lo_ns": chunk.time_lo_ns, "time_hi_ns": chunk.time_hi_ns,
                "max_duration_ns": validated.max_duration_ns, "data": chunk.data,
            }
        )  # fmt: skip
        if validated.steps is not None and validated.values is not None:
            values = validated.values
            if ranks.is_on_device(chunk.attempt, chunk.rank):
                values = known_to_host(values)
            unit.tiles.add(batch.run_id, chunk.attempt, chunk.rank, validated.steps, values)
        if validated.operations is not None:
            unit.operations.add(batch.run_id, chunk.attempt, validated.operations)
        if chunk.rank >= 0:
            ranks.seen(chunk.attempt, chunk.rank, chunk.time_lo_ns, chunk.step_lo, chunk.host)
            ranks.seen(chunk.attempt, chunk.rank, chunk.time_hi_ns, chunk.step_hi, chunk.host)
        changed.add("samples" if chunk.kind in SAMPLE_KINDS else chunk.kind)
    if rows:
        unit.connection.execute(sa.insert(tables.chunk), rows)
    add_spans(unit.connection, batch.run_id, (validated.chunk for validated in batch.chunks))
    return changed


def _update_run(unit: Unit, batch: ValidatedBatch, ranks: RankRows, num_lines: int) -> None:
    connection, table = unit.connection, tables.run
    row = connection.execute(sa.select(table).where(table.c.run_id == batch.run_id)).first()
    if row is None:
        connection.execute(sa.insert(table).values(run_id=batch.run_id, received_ns=unit.now_ns))
        row = connection.execute(sa.select(table).where(table.c.run_id == batch.run_id)).one()
    times = [record.time_ns for record in batch.records]
    times += [validated.chunk.time_hi_ns for validated in batch.chunks]
    values: dict[str, Any] = {
        "received_ns": unit.now_ns,
        "last_seen_ns": max([row.last_seen_ns, *times]),
        "attempt": max([row.attempt, *ranks.attempts]),
        "step": max(row.step, ranks.step),
        "log_lines": row.log_lines + num_lines,
        "refused": row.refused + len(batch.refused),
        "version": row.version + 1,
    }
    if ranks.clean_step and values["step"] == ranks.clean_step + 1:
        values["step"] = ranks.clean_step  # it ended before the step that would have come next
    if times and (row.started_ns == 0 or min(times) < row.started_ns):
        values["started_ns"] = min(times)
    for record in batch.records:
        if isinstance(record, schema.RunStarted) and not row.name and "name" not in values:
            values |= {
                "name": record.name or batch.run_id,
                "command": json.dumps(record.command),
                "launcher": record.launcher,
                "tags": json.dumps(record.tags),
            }
        if isinstance(record, schema.RunStarted | schema.RankRegistered) and record.world_size:
            values["world_size"] = record.world_size
    connection.execute(sa.update(table).where(table.c.run_id == batch.run_id).values(values))
    _update_attempts(unit, batch, ranks)


def _update_attempts(unit: Unit, batch: ValidatedBatch, ranks: RankRows) -> None:
    table = tables.attempt
    sizes: dict[int, int] = defaultdict(int)
    for record in batch.records:
        if isinstance(record, schema.RunStarted | schema.RankRegistered):
            sizes[record.attempt] = max(sizes[record.attempt], record.world_size)
    for number, seen in ranks.attempts.items():
        where = (table.c.run_id == batch.run_id) & (table.c.attempt == number)
        row = unit.connection.execute(sa.select(table).where(where)).first()
        steps = [n for n in (row and row.step_lo, row and row.step_hi, *seen.steps) if n]
        times = [n for n in (row and row.started_ns, row and row.last_seen_ns, *seen.times) if n]
        values = {
            "started_ns": min(times, default=0),
            "last_seen_ns": max(times, default=0),
            "world_size": sizes.get(number) or (row.world_size if row else 0),
            "step_lo": min(steps, default=None),
            "step_hi": max(steps, default=None),
        }
        if ranks.clean_step and values["step_hi"] == ranks.clean_step + 1:
            values["step_hi"] = ranks.clean_step  # as in the row of the run
        if row is None:
            values |= {"run_id": batch.run_id, "attempt": number}
            unit.connection.execute(sa.insert(table).values(values))
        else:
            unit.connection.execute(sa.update(table).where(where).values(values))
