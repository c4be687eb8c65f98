"""Gives a fresh analysis everything that the store knows of a run, in the order it came."""

from __future__ import annotations

from typing import Protocol

import msgspec
import sqlalchemy as sa

from rankscope.wire import schema
from rankscope.wire.chunk import Column, decode_chunk
from rankscope.wire.schema import AnyRecord, Chunk
from rankscope_server.store import tables
from rankscope_server.store.packing import unpack

_decode_records = msgspec.msgpack.Decoder(list[AnyRecord]).decode
_decode_state = msgspec.json.Decoder(schema.RankState).decode


class Replayed(Protocol):
    """What takes records and chunks."""

    def apply_record(self, record: AnyRecord) -> None:
        """Take a record."""

    def apply_chunk(self, chunk: Chunk, columns: dict[str, Column]) -> None:
        """Take a chunk with its decoded columns."""


def newest_batch(connection: sa.Connection, run_id: str) -> int:
    """Return the id of the newest batch that this connection sees of a run; 0 for none."""
    table = tables.batch.c
    newest = connection.scalar(sa.select(sa.func.max(table.id)).where(table.run_id == run_id))
    return int(newest or 0)


def replay(
    connection: sa.Connection, run_id: str, state: Replayed, newest: int, horizon_ns: int
) -> None:
    """Apply all records, and the chunks received since `horizon_ns`; then where each rank is.

    Stops at the batch `newest`: later ones are on their way in memory.

    Log lines are not replayed (see `notable_lines`); of the states of a rank only the newest is
    stored.
    """
    batches = tables.batch.c
    rows = connection.execute(
        sa.select(batches.id, batches.received_ns, batches.records)
        .where(batches.run_id == run_id, batches.id <= newest)
        .order_by(batches.id)
    )
    for batch_id, received_ns, records in rows:
        for record in _decode_records(unpack(records)) if records else ():
            state.apply_record(record)
        if received_ns >= horizon_ns:
            _replay_chunks(connection, batch_id, state)
    ranks = tables.rank.c
    states = connection.scalars(
        sa.select(ranks.state)
        .where(ranks.run_id == run_id, ranks.state.is_not(None))
        .order_by(ranks.attempt, ranks.rank)
    )
    for text in states:
        state.apply_record(_decode_state(text))


def chunk_of_row(row: sa.Row[tuple[object, ...]]) -> Chunk:
    """Return the chunk that a row of `chunk` holds."""
    names = Chunk.__struct_fields__
    return Chunk(**{name: row._mapping[name] for name in names})


def _replay_chunks(connection: sa.Connection, batch_id: int, state: Replayed) -> None:
    table = tables.chunk
    rows = connection.execute(
        sa.select(table).where(table.c.batch_id == batch_id).order_by(table.c.id)
    )
    for row in rows:
        chunk = chunk_of_row(row)
        state.apply_chunk(chunk, decode_chunk(chunk.data))
