"""Pages of chunks and of rows of a run, in an order that new ones do not change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from rankscope.wire.schema import CHUNK_COLUMNS
from rankscope.wire.stored import (
    MAX_ROWS,
    PAGE_BYTES,
    ROW_COLUMNS,
    ChunkPage,
    RowPage,
    StoredChunk,
)
from rankscope_server.problems import Problem
from rankscope_server.store import tables
from rankscope_server.store.chunks import PLACE, counting, data_of
from rankscope_server.store.packing import unpack

_CHUNKS_AT_ONCE = 64  # of 16,384 events at most, some 80 KB each
_MAX_CHUNKS = 8_192  # of a page
_TABLES: dict[str, sa.Table] = {
    "attempts": tables.attempt,
    "ranks": tables.rank,
    "groups": tables.process_group,
    "environment": tables.environment,
    "metrics": tables.metric,
    "events": tables.event,
    "errors": tables.error_event,
    "findings": tables.finding,
    "clock_offsets": tables.clock_offset,
    "losses": tables.loss,
}
_PACKED = frozenset({("environment", "facts")})  # zstd of JSON
_MAX_AFTER = 2_000  # letters


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which chunks are asked for; None, or no ranks: any. Steps `lo` to `hi`, both included."""

    kind: str
    attempt: int | None = None
    ranks: Sequence[tuple[int, int]] = ()
    lo: int | None = None
    hi: int | None = None

    def where(self, run_id: str) -> list[sa.ColumnElement[bool]]:
        """Return the conditions of chunks that may hold some of them."""
        table = tables.chunk.c
        found = [table.run_id == run_id, table.kind == self.kind]
        if self.attempt is not None:
            found.append(table.attempt == self.attempt)
        if self.ranks:
            last = sa.case((table.rank_hi < 0, table.rank), else_=table.rank_hi)
            within = [sa.and_(table.rank <= hi, last >= lo) for lo, hi in self.ranks]
            found.append(sa.or_(*within))
        if self.lo is not None:
            found.append(table.step_hi >= self.lo)
        if self.hi is not None:
            found.append(table.step_lo <= self.hi)
        return found


def chunk_page(
    connection: sa.Connection, run_id: str, wanted: Wanted, after: int | None
) -> ChunkPage:
    """Return the chunks that come after one, as many as a page holds. Raises Problem 422."""
    if wanted.kind not in CHUNK_COLUMNS:
        raise _unknown_kind(wanted.kind, CHUNK_COLUMNS)
    table, where = tables.chunk.c, wanted.where(run_id)
    if after is not None:
        _check_unmoved(connection, where, after)
    num_events = None
    if after is None:
        num_events = int(
            connection.scalar(sa.select(sa.func.sum(table["count"])).where(*where)) or 0
        )
    # the order first, of numbers alone: what is sorted with its chunks takes all of their memory
    ids = connection.scalars(
        sa.select(table.id)
        .where(*where, table.id > (after or 0))
        .order_by(table.id)
        .limit(_MAX_CHUNKS + 1)
    ).all()
    unread = counting(connection)
    chunks, num_bytes, num_passed = list[StoredChunk](), 0, 0
    for at in range(0, min(len(ids), _MAX_CHUNKS), _CHUNKS_AT_ONCE):
        part = ids[at : at + _CHUNKS_AT_ONCE]
        num_passed += len(part)
        for row in _chunks(connection, part):
            chunks.append(row)
            num_bytes += len(row.data)
        if num_bytes >= PAGE_BYTES:
            break
    last = int(ids[num_passed - 1]) if num_passed < len(ids) else None
    return ChunkPage(chunks, last, num_events, unread.count)


def _check_unmoved(
    connection: sa.Connection, where: list[sa.ColumnElement[bool]], after: int
) -> None:
    """Raise Problem 409 where chunks of pages before were put into one with some that are not."""
    table = tables.chunk.c
    moved = sa.select(table.id).where(
        *where, table.row_group >= 0, table.id > after, table.first_id <= after
    )
    if connection.scalar(moved.limit(1)) is not None:
        raise Problem(409, "chunks were put together meanwhile", "after", "begin without it again")


def _chunks(connection: sa.Connection, ids: Sequence[int]) -> list[StoredChunk]:
    table = tables.chunk.c
    rows = connection.execute(
        sa.select(table.attempt, table.rank, table.host, table["count"].label("events"), *PLACE)
        .where(table.id.in_(ids))
        .order_by(table.id)
    ).all()
    return [
        StoredChunk(row.attempt, row.rank, row.host, row.events, data)
        for row, data in data_of(connection, rows)
    ]


def row_page(connection: sa.Connection, run_id: str, kind: str, after: str, limit: int) -> RowPage:
    """Return the rows that come after one, as many as a page holds. Raises Problem 422."""
    if kind not in ROW_COLUMNS:
        raise _unknown_kind(kind, ROW_COLUMNS)
    table, names = _TABLES[kind], ROW_COLUMNS[kind]
    keys = [column for column in table.primary_key if column.name != "run_id"]
    where = [table.c.run_id == run_id]
    if after:
        where.append(sa.tuple_(*keys) > sa.tuple_(*_key_of(after, keys)))
    columns = [*(table.c[name] for name in names), *keys]
    rows = connection.execute(
        sa.select(*(column.label(f"c{at}") for at, column in enumerate(columns)))
        .where(*where)
        .order_by(*keys)
        .limit(min(limit, MAX_ROWS) + 1)
    ).all()
    page = rows[:limit]
    packed = [at for at, name in enumerate(names) if (kind, name) in _PACKED]
    found = []
    for row in page:
        cells: list[Any] = list(row[: len(names)])
        for at in packed:
            cells[at] = unpack(cells[at]).decode()
        found.append(cells)
    is_last = len(rows) == len(page)
    last = None if is_last else json.dumps(list(page[-1][len(names) :]), separators=(",", ":"))
    return RowPage(list(names), found, last)


def _key_of(after: str, keys: Sequence[sa.Column[Any]]) -> list[Any]:
    """Return the key that a page gave. Raises Problem 422."""
    try:
        found = json.loads(after[:_MAX_AFTER])
    except ValueError:
        found = None
    kinds = [key.type.python_type for key in keys]
    if not isinstance(found, list) or [type(value) for value in found] != kinds:
        remedy = "give what the page before said as after"
        raise Problem(422, f"{after[:40]!r} is no place in these rows", "after", remedy)
    if any(isinstance(value, int) and abs(value) >= 1 << 63 for value in found):
        raise Problem(422, f"{after[:40]!r} is out of range", "after", "begin without it")
    return [value.replace("\x00", "") if isinstance(value, str) else value for value in found]


def _unknown_kind(kind: str, known: dict[str, tuple[str, ...]]) -> Problem:
    return Problem(
        422, f"kind {kind[:20]!r} is not known", "kind", f"use one of {', '.join(known)}"
    )
