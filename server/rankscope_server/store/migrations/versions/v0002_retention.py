"""Tables of retention: pins, deletions, what was removed, how much there is."""

from __future__ import annotations

from alembic import op

from rankscope_server.store import tables
from rankscope_server.store.migrations.versions import v0001_generated_first_tables as first

revision = "0002_retention"
down_revision = first.revision
_ADDED = (
    tables.pin, tables.deletion, tables.removal, tables.received_mark, tables.stored_size,
    tables.size_counted,
)  # fmt: skip


def upgrade() -> None:
    """Make the tables; where the first ones were generated with them, they are there."""
    for table in _ADDED:
        table.create(op.get_bind(), checkfirst=True)
