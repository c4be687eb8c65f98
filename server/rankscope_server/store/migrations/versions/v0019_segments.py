"""Old chunks may be row groups of Parquet files."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from rankscope_server.store.migrations.columns import number, run, word

revision = "0019_segments"
down_revision = "0018_objects"


def upgrade() -> None:
    """Add which row group a row is, and the files."""
    op.add_column("chunk", number("row_group", -1))
    op.add_column("chunk", number("first_id"))
    op.create_table(
        "segment",
        sa.Column("object", sa.Text, primary_key=True),
        run(),
        word("kind", 32),
        *(number(name) for name in ("version", "count", "num_bytes")),
        *(number(name) for name in ("footer_start", "footer_crc32")),
    )
    op.create_index("ix_segment_run_id", "segment", ["run_id"])
