"""Gives a fresh analysis everything that the store knows of a run, in the order it came."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import closing
from functools import partial
from typing import Any, Protocol

import msgspec
import sqlalchemy as sa

from rankscope.wire import schema
from rankscope.wire.chunk import ChunkError, Column, decode_chunk
from rankscope.wire.schema import AnyRecord, Chunk
from rankscope_server.store import tables
from rankscope_server.store.chunks import data_of, left_out
from rankscope_server.store.packing import unpack

# Of a kind the newest, seconds of work: tables of collectives hold no more, those of steps 4,096 of
# 1,024 ranks.
MOST_EVENTS = {"collectives": 4_000_000, "steps": 1 << 22}
_ROWS_AT_ONCE = 500
_decode_records = msgspec.msgpack.Decoder(list[AnyRecord]).decode
_decode_ageing = msgspec.msgpack.Decoder(tuple[list[int], list[AnyRecord]]).decode
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
    connection: sa.Connection,
    run_id: str,
    state: Replayed,
    newest: int,
    horizon_ns: int,
    *,
    after: int = 0,
) -> int:
    """Apply all records, and the chunks received since `horizon_ns`; then where each rank is.

    Begins `after` a batch, and stops at the batch `newest`: later ones are on their way in memory.
    Of collectives and steps the newest are enough: to read hours of them again takes as long.

    Log lines are not replayed (see `notable_lines`); of the states of a rank only the newest is
    stored. Returns how many batches there are.
    """
    batches = tables.batch.c
    mine = (batches.run_id == run_id) & (batches.id <= newest) & (batches.id > after)
    journals = _journals(
        connection, run_id, lambda batch_id: (batch_id <= newest) & (batch_id > after)
    )
    first = connection.scalar(
        sa.select(sa.func.min(batches.id)).where(mine, batches.received_ns >= horizon_ns)
    )
    chunks = _chunks(
        connection,
        run_id,
        sa.false() if first is None else tables.chunk.c.batch_id.between(int(first), newest),
        ("collectives",) if after else tuple(MOST_EVENTS),
    )
    _apply(connection, state, journals, chunks)
    replay_states(connection, run_id, state)
    count = sa.select(sa.func.count()).select_from(tables.batch).where(mine)
    return int(connection.scalar(count) or 0)


def _apply(
    connection: sa.Connection,
    state: Replayed,
    journals: Generator[tuple[int, list[AnyRecord]]],
    chunks: Generator[tuple[int, Chunk]],
) -> None:
    sources: tuple[Iterator[tuple[int, Any]], ...] = (journals, chunks)
    # closed before their connection is, also where the data of chunks cannot be read
    with closing(journals), closing(chunks):
        for _, part in heapq.merge(*sources, key=lambda item: item[0]):
            if isinstance(part, list):  # of one batch the records come first
                for record in part:
                    state.apply_record(record)
                continue
            try:
                columns = decode_chunk(part.data)
            except ChunkError as error:
                left_out(connection, str(error))
            else:
                state.apply_chunk(part, columns)


def replay_batches(
    connection: sa.Connection, run_id: str, state: Replayed, chosen: Collection[int]
) -> None:
    """Apply the records and chunks of some batches, in the order of their ids."""
    ids = sorted(chosen)
    for at in range(0, len(ids), _ROWS_AT_ONCE):
        part = ids[at : at + _ROWS_AT_ONCE]
        journals = _journals(connection, run_id, partial(_is_among, part))
        chunks = _chunks(connection, run_id, tables.chunk.c.batch_id.in_(part))
        _apply(connection, state, journals, chunks)


def _is_among(ids: Collection[int], column: sa.Column[int]) -> sa.ColumnElement[bool]:
    return column.in_(ids)


def _journals(
    connection: sa.Connection,
    run_id: str,
    chosen: Callable[[sa.Column[int]], sa.ColumnElement[bool]],
) -> Generator[tuple[int, list[AnyRecord]]]:
    """Yield the records of batches in order: what stays with the run, and what is left of it."""
    batch, journal = tables.batch.c, tables.journal.c
    lasting = sa.select(batch.id, batch.records, sa.literal("").label("kind")).where(
        batch.run_id == run_id, chosen(batch.id), batch.records.is_not(None)
    )
    ageing = sa.select(journal.batch_id, journal.records, journal.kind).where(
        journal.run_id == run_id, chosen(journal.batch_id)
    )
    statement = sa.union_all(lasting, ageing).order_by("id")
    with connection.execute(statement.execution_options(yield_per=_ROWS_AT_ONCE)) as rows:
        for batch_id, parts in itertools.groupby(rows, key=lambda row: int(row.id)):
            yield batch_id, _as_they_came(parts)


def _as_they_came(parts: Iterable[sa.Row[Any]]) -> list[AnyRecord]:
    """Return the records of a batch in their order; where some are gone, others move up."""
    lasting: list[AnyRecord] = []
    placed: list[tuple[int, AnyRecord]] = []
    for row in parts:
        if row.kind:
            placed += zip(*_decode_ageing(unpack(row.records)), strict=True)
        else:
            lasting = _decode_records(unpack(row.records))
    found: list[AnyRecord] = []
    rest = iter(lasting)
    for place, record in sorted(placed, key=lambda item: item[0]):
        found += itertools.islice(rest, max(place - len(found), 0))
        found.append(record)
    return [*found, *rest]


def replay_states(connection: sa.Connection, run_id: str, state: Replayed) -> None:
    """Apply the newest state of each rank."""
    ranks = tables.rank.c
    states = connection.scalars(
        sa.select(ranks.state)
        .where(ranks.run_id == run_id, ranks.state.is_not(None))
        .order_by(ranks.attempt, ranks.rank)
    )
    for text in states:
        state.apply_record(_decode_state(text))


def _chunk_of(row: sa.Row[Any], data: bytes) -> Chunk:
    mapping = dict(row._mapping) | {"data": data}
    return Chunk(**{name: mapping[name] for name in Chunk.__struct_fields__})


def _chunks(
    connection: sa.Connection,
    run_id: str,
    of_batches: sa.ColumnElement[bool],
    limited: Collection[str] = ("collectives",),
) -> Generator[tuple[int, Chunk]]:
    """Yield the chunks of some batches with the number of their batch, in order.

    Those of a kind that is `limited` are of its newest events. What is missing or damaged is left
    out. Raises StoreUnavailableError where the data of chunks cannot be read now.
    """
    table = tables.chunk
    statement = (
        sa.select(table)
        .where(
            table.c.run_id == run_id,
            of_batches,
            *(
                (table.c.kind != kind) | (table.c.id >= _first_counted(connection, run_id, kind))
                for kind in limited
            ),
        )
        .order_by(table.c.batch_id, table.c.id)
    )
    with connection.execute(statement.execution_options(yield_per=_ROWS_AT_ONCE)) as rows:
        for part in rows.partitions(_ROWS_AT_ONCE):
            for row, data in data_of(connection, part):
                yield row.batch_id, _chunk_of(row, data)


def _first_counted(connection: sa.Connection, run_id: str, kind: str) -> int:
    """Return the first chunk of a kind that is among those of its newest events."""
    table, events, first = tables.chunk.c, 0, 0
    rows = connection.execute(
        sa.select(table.id, table["count"])
        .where(table.run_id == run_id, table.kind == kind)
        .order_by(table.id.desc())
        .limit(MOST_EVENTS[kind])
    )
    for chunk_id, count in rows:
        first, events = int(chunk_id), events + int(count)
        if events >= MOST_EVENTS[kind]:
            break
    rows.close()
    return first
