"""Marks of time: the largest id of each table that holds raw data, every few minutes.

Age by a sender's clock would take data of a node whose clock is wrong too early, and that of an
imported recording at once. Ids grow as rows come, so a mark says what came before it.
"""

from __future__ import annotations

import sqlalchemy as sa

from rankscope_server.store import tables
from rankscope_server.store.unit import Unit

PAUSE_NS = 600 * 10**9
_MARKED: dict[str, sa.Table] = {
    "chunk_id": tables.chunk, "log_block_id": tables.log_block, "event_id": tables.event,
    "stacks_id": tables.stacks, "command_id": tables.command, "batch_id": tables.batch,
}  # fmt: skip


def mark(unit: Unit) -> None:
    """Write a mark, unless the newest one is young or nothing came since."""
    table, connection = tables.received_mark, unit.connection
    newest = connection.execute(sa.select(table).order_by(table.c.time_ns.desc()).limit(1)).first()
    if newest is not None and 0 <= unit.now_ns - newest.time_ns < PAUSE_NS:
        return
    ids = {name: _largest(connection, source) for name, source in _MARKED.items()}
    if newest is None or any(newest._mapping[name] != number for name, number in ids.items()):
        connection.execute(sa.insert(table).values(time_ns=unit.now_ns, **ids))


def lower(connection: sa.Connection, source: sa.Table) -> None:
    """Lower the marks of a table after rows were removed, in the same transaction.

    SQLite gives the ids of removed last rows again: new rows must not count as old, or as counted.
    """
    column = next((name for name, table in _MARKED.items() if table is source), "")
    if connection.dialect.name != "sqlite" or not column:
        return
    largest = _largest(connection, source)
    marked, counted = tables.received_mark, tables.size_counted
    connection.execute(
        sa.update(marked).where(marked.c[column] > largest).values({column: largest})
    )
    connection.execute(
        sa.update(counted)
        .where(counted.c.source == source.name, counted.c.counted_id > largest)
        .values(counted_id=largest)
    )


def _largest(connection: sa.Connection, source: sa.Table) -> int:
    return int(connection.scalar(sa.select(sa.func.max(source.c.id))) or 0)
