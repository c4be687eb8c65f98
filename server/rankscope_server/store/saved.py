"""What people keep under a name: texts of the search box, and views of the dashboard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from rankscope_server.store import tables
from rankscope_server.store.unit import Unit

MAX_SAVED = 200  # of a project, of each shelf


@dataclass(frozen=True, slots=True)
class Shelf:
    """A table of what is kept, and its column that holds it."""

    table: sa.Table
    text: sa.Column[str]


SEARCHES = Shelf(tables.saved_search, tables.saved_search.c.q)
VIEWS = Shelf(tables.saved_view, tables.saved_view.c.address)


def read_saved(connection: sa.Connection, shelf: Shelf, project: str) -> list[sa.Row[Any]]:
    """Return all that a project keeps, by name."""
    query = sa.select(shelf.table).where(shelf.table.c.project == project)
    return list(connection.execute(query.order_by(shelf.table.c.name)))


def save(unit: Unit, shelf: Shelf, project: str, name: str, text: str) -> bool:
    """Keep a text, in place of one of the same name; return whether there was room."""
    table = shelf.table
    values = {shelf.text.name: text, "created_ns": unit.now_ns}
    changed = unit.connection.execute(
        sa.update(table).where(table.c.project == project, table.c.name == name).values(values)
    )
    if changed.rowcount:
        return True
    count = unit.connection.scalar(
        sa.select(sa.func.count()).select_from(table).where(table.c.project == project)
    )
    if (count or 0) >= MAX_SAVED:
        return False
    unit.connection.execute(sa.insert(table).values(project=project, name=name, **values))
    return True


def drop_saved(unit: Unit, shelf: Shelf, project: str, row_id: int) -> bool:
    """Drop what a project keeps; return whether it was there."""
    table = shelf.table
    dropped = unit.connection.execute(
        sa.delete(table).where(table.c.project == project, table.c.id == row_id)
    )
    return bool(dropped.rowcount)
