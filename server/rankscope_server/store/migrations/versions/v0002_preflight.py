"""The tables of preflight."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "preflight",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("run_id", sa.String(length=128), server_default="", nullable=False),
        sa.Column("key", sa.Text(), server_default="", nullable=False),
        sa.Column("token", sa.Text(), server_default="", nullable=False),
        sa.Column("coordinated", sa.Text(), server_default="", nullable=False),
        sa.Column("nodes", sa.Text(), server_default="[]", nullable=False),
        sa.Column("num_nodes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("created_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("expires_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("finished_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("status", sa.Text(), server_default="unknown", nullable=False),
        sa.Column("num_failures", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("num_warnings", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("verdict", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_preflight")),
    )
    op.create_index("ix_preflight_run_id", "preflight", ["run_id"], unique=False)
    op.create_index("ix_preflight_created_ns", "preflight", ["created_ns"], unique=False)
    op.create_table(
        "preflight_node",
        sa.Column("preflight_id", sa.String(length=64), nullable=False),
        sa.Column("node", sa.String(length=255), nullable=False),
        sa.Column("host", sa.String(length=255), server_default="", nullable=False),
        sa.Column("node_rank", sa.BigInteger(), server_default="-1", nullable=False),
        sa.Column("observed", sa.Text(), server_default="", nullable=False),
        sa.Column("joined_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("status", sa.Text(), server_default="unknown", nullable=False),
        sa.Column("findings", sa.Text(), server_default="[]", nullable=False),
        sa.Column("report", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("preflight_id", "node", name=op.f("pk_preflight_node")),
    )
    op.create_index("ix_preflight_node_node", "preflight_node", ["node"], unique=False)
    op.create_index("ix_preflight_node_host", "preflight_node", ["host"], unique=False)


def downgrade() -> None:
    """Drop the tables."""
    op.drop_table("preflight_node")
    op.drop_table("preflight")
