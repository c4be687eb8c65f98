"""What was done by whom; failed tries of one address in a minute are one row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from rankscope_server.store import tables

AUDIT_KEPT = 100_000  # rows; the oldest go
_FORGET_EVERY = 100
_MAX_TEXT = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """One thing that was done, or tried."""

    action: str
    who: str
    project: str
    address: str = ""
    target: str = ""
    detail: str = ""
    count: int = 1


def record(connection: sa.Connection, deed: Deed, now_ns: int) -> None:
    """Store a deed, and make room."""
    table = tables.audit
    inserted = connection.execute(
        sa.insert(table).values(
            time_ns=now_ns, project=deed.project, who=deed.who[:_MAX_TEXT],
            address=deed.address[:_MAX_TEXT], action=deed.action[:128],
            target=deed.target[:_MAX_TEXT], detail=deed.detail[:_MAX_TEXT], count=deed.count,
        )
    )  # fmt: skip
    id = int(inserted.inserted_primary_key[0])  # type: ignore[index]
    if id % _FORGET_EVERY == 0:
        connection.execute(sa.delete(table).where(table.c.id <= id - AUDIT_KEPT))


def rows(
    connection: sa.Connection, project: str | None, before: int | None, limit: int
) -> list[sa.Row[Any]]:
    """Return what was done, the newest first; of one project or all; `before` an id."""
    table = tables.audit
    query = sa.select(table).order_by(table.c.id.desc()).limit(limit)
    if project is not None:
        query = query.where(table.c.project == project)
    if before is not None:
        query = query.where(table.c.id < before)
    return list(connection.execute(query))
