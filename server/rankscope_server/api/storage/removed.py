"""What retention took from a run that is still there, in words for its pages."""

from __future__ import annotations

from typing import cast

import sqlalchemy as sa

from rankscope_server.answers import of_row
from rankscope_server.api.storage.schema import RemovedRow
from rankscope_server.retention.kinds import LABELS, Kind
from rankscope_server.store import tables


def removed(connection: sa.Connection, run_id: str) -> list[RemovedRow]:
    """Return what was removed, by kind."""
    table = tables.removal
    rows = connection.execute(
        sa.select(table).where(table.c.run_id == run_id).order_by(table.c.kind)
    )
    return [of_row(RemovedRow, row, text=_says(row.kind, row.bytes)) for row in rows]


def in_words(num_bytes: int) -> str:
    """Return a size as people read it."""
    value, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{num_bytes} bytes" if unit == "bytes" else f"{value:.1f} {unit}"


def _says(kind: str, num_bytes: int) -> str:
    label = LABELS.get(cast(Kind, kind), kind)
    return f"Older {label} were removed by retention ({in_words(num_bytes)})."
