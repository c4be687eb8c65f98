"""Views of the dashboard that people keep."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from rankscope_server.store.migrations.columns import number, serial, word

revision = "0011_saved_views"
down_revision = "0010_run_cost"


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "saved_view",
        serial(), word("name", 128), sa.Column("address", sa.Text, nullable=False),
        number("created_ns"), word("project", 64, default="default"),
        sa.UniqueConstraint("project", "name"), sqlite_autoincrement=True,
    )  # fmt: skip
