"""Server processes that share a database, and their leases."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from rankscope_server.store.migrations.columns import number, text, word

revision = "0008_leases"
down_revision = "0007_oidc"


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "server",
        word("id", 32, is_key=True), text("name"), number("expires_ns"), number("behind_ms"),
        sa.Column("queue_ratio", sa.Double, nullable=False, server_default="0"),
        text("says", "{}"),
    )  # fmt: skip
    op.create_table(
        "lease",
        word("name", 160, is_key=True), word("run_id", 128, ""), word("owner", 32, ""),
        number("epoch"),
    )  # fmt: skip
    op.create_index("ix_lease_run_id", "lease", ["run_id"])
