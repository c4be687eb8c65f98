"""The data of chunks may be in objects, which their rows name."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from rankscope_server.store.migrations.columns import number, text

revision = "0018_objects"
down_revision = "0017_log"


def upgrade() -> None:
    """Add where the data of a chunk is, whose the objects are, and which are to go."""
    op.add_column("chunk", text("object", None))
    for name in ("start", "num_bytes", "crc32"):
        op.add_column("chunk", number(name))
    is_in_object = sa.text("object IS NOT NULL")
    op.create_index(
        "ix_chunk_object", "chunk", ["object"],
        sqlite_where=is_in_object, postgresql_where=is_in_object,
    )  # fmt: skip
    op.create_table("object_owner", number("number", is_key=True), text("owner"))
    op.create_table(
        "dropped_object", sa.Column("object", sa.Text, primary_key=True), number("due_ns")
    )
