"""The process groups that ranks of a run reported."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa

from rankscope_server.api.groups.mesh import Group
from rankscope_server.store import tables


def groups_of(connection: sa.Connection, run: sa.Row[Any]) -> list[Group]:
    """Return the process groups of the newest attempt."""
    table = tables.process_group.c
    rows = connection.execute(
        sa.select(table.group, table.ranks, table.backend, table.description)
        .where(table.run_id == run.run_id, table.attempt == run.attempt)
        .order_by(table.group)
    )
    return [
        Group(name, tuple(json.loads(ranks)), backend, description)
        for name, ranks, backend, description in rows
    ]
