"""What a run cost, as its analysis worked it out."""

from __future__ import annotations

from alembic import op

from rankscope_server.store.migrations.columns import text

revision = "0010_run_cost"
down_revision = "0009_chunks_of_ranks"


def upgrade() -> None:
    """Add the column; of runs from before it is not known."""
    op.add_column("run", text("cost", None))
