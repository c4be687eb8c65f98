"""What retention took from a run that is still there, in words for its pages."""

from __future__ import annotations

from typing import cast

import sqlalchemy as sa

from rankscope_server.answers import of_row
from rankscope_server.api.storage.schema import RemovedRow
from rankscope_server.retention.kinds import LABELS, Kind
from rankscope_server.store import tables
from rankscope_server.text import size_text


def removed(connection: sa.Connection, run_id: str) -> list[RemovedRow]:
    """Return what was removed, by kind."""
    table = tables.removal
    rows = connection.execute(
        sa.select(table).where(table.c.run_id == run_id).order_by(table.c.kind)
    )
    return [of_row(RemovedRow, row, text=_says(row.kind, row.bytes)) for row in rows]


def _says(kind: str, num_bytes: int) -> str:
    label = LABELS.get(cast(Kind, kind), kind)
    return f"Older {label} were removed by retention ({size_text(num_bytes)})."
