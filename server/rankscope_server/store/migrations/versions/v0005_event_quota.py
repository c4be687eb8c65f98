"""The quota of a token in events."""

from __future__ import annotations

from alembic import op

from rankscope_server.store.migrations.columns import number

revision = "0005_event_quota"
down_revision = "0004_access"


def upgrade() -> None:
    """Add the column; tokens from before have no such quota."""
    op.add_column("token", number("events_per_second"))
