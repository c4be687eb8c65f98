"""Searches that people keep: a name and the text of the search box."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from rankscope_server.store import tables
from rankscope_server.store.unit import Unit

MAX_SEARCHES = 200


@dataclass(frozen=True, slots=True)
class StoredSearch:
    """A search that was kept."""

    id: int
    name: str
    q: str
    created_ns: int


def read_searches(connection: sa.Connection, project: str) -> list[StoredSearch]:
    """Return all of a project, by name."""
    table = tables.saved_search
    rows = connection.execute(
        sa.select(table).where(table.c.project == project).order_by(table.c.name)
    )
    return [StoredSearch(row.id, row.name, row.q, row.created_ns) for row in rows]


def keep_search(unit: Unit, project: str, name: str, q: str) -> bool:
    """Keep a search, in place of one of the same name; return whether there was room."""
    table = tables.saved_search
    changed = unit.connection.execute(
        sa.update(table)
        .where(table.c.project == project, table.c.name == name)
        .values(q=q, created_ns=unit.now_ns)
    )
    if changed.rowcount:
        return True
    count = unit.connection.scalar(
        sa.select(sa.func.count()).select_from(table).where(table.c.project == project)
    )
    if (count or 0) >= MAX_SEARCHES:
        return False
    unit.connection.execute(
        sa.insert(table).values(project=project, name=name, q=q, created_ns=unit.now_ns)
    )
    return True


def drop_search(unit: Unit, project: str, search_id: int) -> bool:
    """Drop a search of a project; return whether it was there."""
    table = tables.saved_search
    dropped = unit.connection.execute(
        sa.delete(table).where(table.c.project == project, table.c.id == search_id)
    )
    return bool(dropped.rowcount)
