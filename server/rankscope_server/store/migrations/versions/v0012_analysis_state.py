"""What the analysis of a live run knows, so that a restarted server reads on from there."""

from __future__ import annotations

from alembic import op

from rankscope_server.store.migrations.columns import blob, number, run_key, text, word

revision = "0012_analysis_state"
down_revision = "0011_saved_views"


def upgrade() -> None:
    """Make the tables; runs from before are read again once."""
    op.create_table(
        "analysis_state",
        run_key(), word("code", 64), number("last_batch"), number("saved_ns"), text("parts", "[]"),
        blob("data"),
    )  # fmt: skip
    op.create_table(
        "analysis_part",
        run_key(), word("digest", 64, is_key=True), blob("data"),
    )  # fmt: skip
