"""The runs of experiment trackers that the ranks of a run log to."""

from __future__ import annotations

from alembic import op

from rankscope_server.store.migrations.columns import text

revision = "0016_trackers"
down_revision = "0015_stalled"


def upgrade() -> None:
    """Add the column; of runs from before none is known."""
    op.add_column("run", text("trackers", "{}"))
