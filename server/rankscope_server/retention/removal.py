"""Removes rows in short transactions, each of which leaves the store in order.

A server that is killed between two goes on with the next: what is left is read from the store.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from rankscope_server.retention import marks
from rankscope_server.retention.dropped import drop_unnamed
from rankscope_server.retention.kinds import Cut, Part, RawKind
from rankscope_server.retention.sizes import Size, subtract
from rankscope_server.store import tables
from rankscope_server.store.engine import upsert
from rankscope_server.store.lines import forget_blocks
from rankscope_server.store.unit import Unit


def remove_raw(unit: Unit, run_id: str, kind: RawKind, part: Part, cut: Cut, most: int) -> Size:
    """Remove at most so many rows of a kind from a run, oldest first; return what went.

    What went is noted with the run, in the same transaction: pages say what they cannot show.
    """
    run = tables.run
    connection = unit.connection
    is_there = connection.scalar(sa.select(run.c.run_id).where(run.c.run_id == run_id))
    where = part.of_run(run_id) & part.received_by(cut)
    size = _remove(connection, part, where, most) if is_there is not None else Size()
    if size.rows:
        _note(unit, run_id, kind, part, cut, size)
        subtract(connection, run_id, kind, size)
        connection.execute(
            sa.update(run).where(run.c.run_id == run_id).values(version=run.c.version + 1)
        )
    if kind == "samples" and size.rows < most:  # these were the last ones
        _shorten_spans(connection, run_id)
    return size


def remove_of_run(unit: Unit, run_id: str, part: Part, most: int) -> Size:
    """Remove at most so many rows of a deleted run from one table; return what went."""
    unit.forget(run_id)
    size = _remove(unit.connection, part, part.of_run(run_id), most)
    table = tables.deletion
    unit.connection.execute(
        sa.update(table)
        .where(table.c.run_id == run_id)
        .values(rows=table.c.rows + size.rows, bytes=table.c.bytes + size.bytes)
    )
    return size


def finish_run(unit: Unit, run_id: str) -> None:
    """Note that nothing is left of a deleted run."""
    table = tables.deletion
    unit.connection.execute(
        sa.update(table).where(table.c.run_id == run_id).values(finished_ns=unit.now_ns)
    )


def _remove(
    connection: sa.Connection, part: Part, where: sa.ColumnElement[bool], most: int
) -> Size:
    table = part.table
    # Every row has an address of the database's own, whatever its key is.
    address: sa.ColumnElement[Any] = sa.literal_column(
        f"{table.name}.ctid" if connection.dialect.name == "postgresql" else f"{table.name}.rowid"
    )
    chosen = sa.select(address).select_from(table).where(where).limit(most).correlate(None)
    if part.by_age is not None:
        chosen = chosen.order_by(part.by_age)
    if table is tables.log_block:
        forget_blocks(connection, chosen.with_only_columns(table.c.id, maintain_column_froms=True))
    named = table.c.object if table is tables.chunk else sa.null()
    gone = connection.execute(
        sa.delete(table).where(address.in_(chosen)).returning(part.num_bytes(), named)
    ).all()
    sizes = [int(num_bytes) for num_bytes, _ in gone]
    if sizes:
        marks.lower(connection, table)
    drop_unnamed(connection, {name for _, name in gone if name is not None})
    return Size(len(sizes), sum(sizes))


def _note(unit: Unit, run_id: str, kind: RawKind, part: Part, cut: Cut, size: Size) -> None:
    connection, table, mark = unit.connection, tables.removal, tables.received_mark
    before_ns = connection.scalar(
        sa.select(sa.func.max(mark.c.time_ns)).where(mark.c[part.mark] <= cut.ids[part.mark])
    )
    row = connection.execute(
        sa.select(table).where(table.c.run_id == run_id, table.c.kind == kind)
    ).first()
    rows, num_bytes, noted_ns = (
        (0, 0, 0) if row is None else (row.rows, row.bytes, row.received_before_ns)
    )
    noted = {
        "run_id": run_id, "kind": kind, "rows": rows + size.rows, "bytes": num_bytes + size.bytes,
        "received_before_ns": max(int(before_ns or 0), noted_ns), "removed_ns": unit.now_ns,
    }  # fmt: skip
    upsert(connection, table, [noted], ("rows", "bytes", "received_before_ns", "removed_ns"))


def _shorten_spans(connection: sa.Connection, run_id: str) -> None:
    """Let the spans of samples begin where the first that is left does."""
    span, chunk = tables.sample_span, tables.chunk.c
    mine = (chunk.run_id == run_id) & (chunk.kind == span.c.kind) & (chunk.host == span.c.host)
    connection.execute(
        sa.update(span)
        .where(span.c.run_id == run_id)
        .values(
            time_lo_ns=sa.func.coalesce(
                sa.select(sa.func.min(chunk.time_lo_ns)).where(mine).scalar_subquery(),
                span.c.time_hi_ns,
            )
        )
    )
