"""Channels and rules of alerts that come from the server's file."""

from __future__ import annotations

from alembic import op

from rankscope_server.store.migrations.columns import number

revision = "0006_alerts_from_file"
down_revision = "0005_event_quota"


def upgrade() -> None:
    """Add the columns; what is there was made by people."""
    for table in ("alert_channel", "alert_rule"):
        op.add_column(table, number("is_from_file"))
