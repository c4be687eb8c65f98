"""Objects that no row names any more: noted with the rows that went, deleted afterwards.

So none goes before its rows are gone for good, whatever dies in between. Objects that no row ever
named are those of a transaction that failed, or of a server that died in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import sqlalchemy as sa

from rankscope_server.store import tables
from rankscope_server.store.blobs import Blobs
from rankscope_server.store.engine import upsert
from rankscope_server.store.unit import Unit

# An object that is older and has no row gets none: its transaction is over.
ORPHAN_NS = 86_400 * 10**9
_AT_ONCE = 500  # SQLite bounds the number of parameters


def drop_unnamed(connection: sa.Connection, objects: Collection[str], due_ns: int = 0) -> None:
    """Note those of some objects that no row names; they are deleted after `due_ns`."""
    names = sorted(objects)
    for at in range(0, len(names), _AT_ONCE):
        part = names[at : at + _AT_ONCE]
        gone = unnamed(connection, part)
        rows = [{"object": name, "due_ns": due_ns} for name in gone]
        upsert(connection, tables.dropped_object, rows)
        segment = tables.segment
        connection.execute(sa.delete(segment).where(segment.c.object.in_(gone)))


def unnamed(connection: sa.Connection, objects: Collection[str]) -> list[str]:
    """Return those of at most `_AT_ONCE` objects that no row names."""
    table = tables.chunk.c
    named = set(
        connection.scalars(sa.select(table.object).where(table.object.in_(objects)).distinct())
    )
    return [name for name in objects if name not in named]


def delete_dropped(
    reader: sa.Engine, write: Callable[[Callable[[Unit], None]], None], blobs: Blobs, now_ns: int
) -> int:
    """Delete the objects that are due; return how many. Raises StoreUnavailableError."""
    table, number = tables.dropped_object, 0
    while True:
        with reader.connect() as connection:
            names = connection.scalars(
                sa.select(table.c.object).where(table.c.due_ns <= now_ns).limit(_AT_ONCE)
            ).all()
        if not names:
            return number
        blobs.delete(names)
        forget = sa.delete(table).where(table.c.object.in_(names))
        write(lambda unit, forget=forget: _do(unit, forget))  # type: ignore[misc]
        number += len(names)


def sweep(reader: sa.Engine, blobs: Blobs, now_ns: int) -> int:
    """Delete the objects of a day ago and older that no row names; return how many.

    Raises StoreUnavailableError.
    """
    number = 0
    for names in blobs.objects_before(now_ns - ORPHAN_NS):
        for at in range(0, len(names), _AT_ONCE):
            with reader.connect() as connection:
                orphans = unnamed(connection, names[at : at + _AT_ONCE])
            blobs.delete(orphans)
            number += len(orphans)
    return number


def _do(unit: Unit, statement: sa.Executable) -> None:
    unit.connection.execute(statement)
