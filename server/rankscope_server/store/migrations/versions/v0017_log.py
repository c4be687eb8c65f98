"""What each process does, and up to where each partition of the log is in the store."""

from __future__ import annotations

from alembic import op

from rankscope_server.store.migrations.columns import number, text

revision = "0017_log"
down_revision = "0016_trackers"


def upgrade() -> None:
    """Add both columns; rows that are there are of processes that do all."""
    op.add_column("server", text("role", "all"))
    op.add_column("lease", number("applied"))
