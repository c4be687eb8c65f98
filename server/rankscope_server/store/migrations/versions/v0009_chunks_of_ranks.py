"""The last rank of a chunk: those of a node may be in one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from rankscope_server.store.migrations.columns import number

revision = "0009_chunks_of_ranks"
down_revision = "0008_leases"


def upgrade() -> None:
    """Add the column; chunks from before are of one rank each."""
    op.add_column("chunk", number("rank_hi", -1))
    op.execute(sa.text("UPDATE chunk SET rank_hi = rank"))
