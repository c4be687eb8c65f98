"""Log lines by host and kind with an index of words; chunks by steps; saved searches.

The blocks of before stay beside, as `first_log_block`: `store/carried.py` moves their lines once
all versions are done, as the code that writes lines knows the newest tables only.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from rankscope_server.store.migrations.columns import blob, number, run, serial, word

revision = "0002_search"
down_revision = "788e2c394a6a"
_INDEX = {
    "sqlite": (
        "CREATE VIRTUAL TABLE log_index USING fts5(terms, content='', columnsize=0, "
        "detail='none', tokenize=\"ascii tokenchars '_'\")",
    ),
    "postgresql": (
        "CREATE TABLE log_index (block_id bigint PRIMARY KEY, terms tsvector NOT NULL)",
        "CREATE INDEX ix_log_index_terms ON log_index USING gin (terms)",
    ),
}


def upgrade() -> None:
    """Put the old blocks aside and make the tables."""
    op.create_index(
        "ix_chunk_run_id_kind_step_hi_step_lo", "chunk", ["run_id", "kind", "step_hi", "step_lo"]
    )
    op.drop_index("ix_log_block_run_id_sealed", "log_block")
    op.drop_index("ix_log_block_run_id_time_hi_ns", "log_block")
    op.rename_table("log_block", "first_log_block")
    dialect = op.get_bind().dialect.name
    if dialect == "postgresql":  # they keep their names, which the new table needs
        op.execute(
            "ALTER TABLE first_log_block RENAME CONSTRAINT pk_log_block TO pk_first_log_block"
        )
        op.execute("ALTER SEQUENCE log_block_id_seq RENAME TO first_log_block_id_seq")
    _lines()
    op.execute("DROP TABLE IF EXISTS log_index")
    for statement in _INDEX[dialect]:
        op.execute(statement)
    op.create_table(
        "saved_search",
        serial(), word("name", 128), sa.Column("q", sa.Text, nullable=False), number("created_ns"),
        word("project", 64, default="default"), sa.UniqueConstraint("project", "name"),
        sqlite_autoincrement=True,
    )  # fmt: skip


def _lines() -> None:
    """Make the tables of log lines."""
    op.create_table(
        "log_word",
        serial(), run(), sa.Column("word", sa.Text, nullable=False),
        sa.UniqueConstraint("run_id", "word"),
    )  # fmt: skip
    op.create_table(
        "log_kind",
        serial(), run(), number("attempt"), number("rank"), number("level"), number("logger"),
        number("stream"), number("has_step"),
        sa.UniqueConstraint("run_id", "attempt", "rank", "level", "logger", "stream", "has_step"),
        sqlite_autoincrement=True,
    )  # fmt: skip
    op.create_table(
        "log_block",
        serial(), run(), number("host"), number("sealed"), number("count"), number("first_row"),
        number("time_lo_ns"), number("time_hi_ns"), number("step_lo"), number("step_hi"),
        number("level_hi"), number("num_bytes"), blob("tally"), sqlite_autoincrement=True,
    )  # fmt: skip
    op.create_index("ix_log_block_run_id_id", "log_block", ["run_id", "id"])
    op.create_index("ix_log_block_run_id_sealed_host", "log_block", ["run_id", "sealed", "host"])
    op.create_index(
        "ix_log_block_run_id_time_hi_ns_sealed", "log_block",
        ["run_id", "time_hi_ns", "sealed"],
    )  # fmt: skip
    op.create_index(
        "ix_log_block_run_id_time_lo_ns_sealed", "log_block",
        ["run_id", "time_lo_ns", "sealed"],
    )  # fmt: skip
    op.create_index("ix_log_block_time_hi_ns", "log_block", ["time_hi_ns"])
    op.create_table(
        "log_lines",
        number("block_id", is_key=True), blob("head"), blob("body"),
    )  # fmt: skip
