"""The first tables, as Alembic generated them, and the full-text index of SQLite."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "attempt",
        sa.Column("run_id", sa.String(length=128), nullable=False),
        sa.Column("attempt", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("started_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("last_seen_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("world_size", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("step_lo", sa.BigInteger(), nullable=True),
        sa.Column("step_hi", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("run_id", "attempt", name=op.f("pk_attempt")),
    )
    op.create_table(
        "batch",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("producer_id", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("sequence", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("run_id", sa.String(length=128), nullable=False),
        sa.Column("received_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("records", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batch")),
        sa.UniqueConstraint("producer_id", "sequence", name=op.f("uq_batch_producer_id_sequence")),
    )
    op.create_index("ix_batch_run_id_id", "batch", ["run_id", "id"], unique=False)
    op.create_table(
        "clock_offset",
        sa.Column("run_id", sa.String(length=128), nullable=False),
        sa.Column("host", sa.String(length=256), nullable=False),
        sa.Column("time_ns", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("offset_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("band_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("run_id", "host", "time_ns", name=op.f("pk_clock_offset")),
    )
    op.create_table(
        "chunk",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("run_id", sa.String(length=128), nullable=False),
        sa.Column("batch_id", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("attempt", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("rank", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("host", sa.Text(), server_default="", nullable=False),
        sa.Column("step_lo", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("step_hi", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("time_lo_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("time_hi_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("count", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("max_duration_ns", sa.BigInteger(), server_default="-1", nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_chunk")),
    )
    op.create_index("ix_chunk_batch_id", "chunk", ["batch_id"], unique=False)
    op.create_index(
        "ix_chunk_run_id_kind_rank_step_hi",
        "chunk",
        ["run_id", "kind", "rank", "step_hi"],
        unique=False,
    )
    op.create_index(
        "ix_chunk_run_id_kind_time_hi_ns", "chunk", ["run_id", "kind", "time_hi_ns"], unique=False
    )
    op.create_table(
        "environment",
        sa.Column("run_id", sa.String(length=128), nullable=False),
        sa.Column("attempt", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("time_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("facts", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt", "rank", name=op.f("pk_environment")),
    )
    op.create_table(
        "error_event",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("run_id", sa.String(length=128), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("attempt", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("rank", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("time_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("step", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("type", sa.Text(), server_default="", nullable=False),
        sa.Column("message", sa.Text(), server_default="", nullable=False),
        sa.Column("traceback", sa.Text(), server_default="", nullable=False),
        sa.Column("place", sa.Text(), server_default="", nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_error_event")),
    )
    op.create_index(
        "ix_error_event_run_id_fingerprint", "error_event", ["run_id", "fingerprint"], unique=False
    )
    op.create_table(
        "event",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("run_id", sa.String(length=128), nullable=False),
        sa.Column("attempt", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("rank", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("time_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("step", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("name", sa.Text(), server_default="", nullable=False),
        sa.Column("fields", sa.Text(), server_default="{}", nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_event")),
    )
    op.create_index("ix_event_run_id", "event", ["run_id"], unique=False)
    op.create_table(
        "finding",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("run_id", sa.String(length=128), nullable=False),
        sa.Column("attempt", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("key", sa.String(length=512), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("opened_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("updated_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("recovered_ns", sa.BigInteger(), nullable=True),
        sa.Column("body", sa.Text(), server_default="", nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_finding")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_finding_run_id_key", "finding", ["run_id", "key"], unique=False)
    op.create_table(
        "finding_event",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("finding_id", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("time_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("event", sa.String(length=32), nullable=False),
        sa.Column("text", sa.Text(), server_default="", nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_finding_event")),
    )
    op.create_index("ix_finding_event_finding_id", "finding_event", ["finding_id"], unique=False)
    op.create_table(
        "log_block",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("run_id", sa.String(length=128), nullable=False),
        sa.Column("sealed", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("count", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("time_lo_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("time_hi_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("level_hi", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("head", sa.LargeBinary(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_log_block")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_log_block_run_id_sealed", "log_block", ["run_id", "sealed"], unique=False)
    op.create_index(
        "ix_log_block_run_id_time_hi_ns", "log_block", ["run_id", "time_hi_ns"], unique=False
    )
    op.create_table(
        "loss",
        sa.Column("run_id", sa.String(length=128), nullable=False),
        sa.Column("producer_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("source", sa.String(length=64), nullable=False),
        sa.Column("reason", sa.String(length=256), nullable=False),
        sa.Column("host", sa.Text(), server_default="", nullable=False),
        sa.Column("count", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("time_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint(
            "run_id", "producer_id", "rank", "source", "reason", name=op.f("pk_loss")
        ),
    )
    op.create_table(
        "metric",
        sa.Column("run_id", sa.String(length=128), nullable=False),
        sa.Column("name", sa.String(length=256), nullable=False),
        sa.Column("rank", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("time_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint(
            "run_id", "name", "rank", "step", "attempt", name=op.f("pk_metric")
        ),
    )
    op.create_table(
        "op_rollup",
        sa.Column("run_id", sa.String(length=128), nullable=False),
        sa.Column("attempt", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("operation", sa.String(length=64), nullable=False),
        sa.Column("group", sa.String(length=256), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("count", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("open", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("sum_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("min_ns", sa.BigInteger(), nullable=True),
        sa.Column("max_ns", sa.BigInteger(), nullable=True),
        sa.Column("blocked_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("histogram", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint(
            "run_id", "attempt", "operation", "group", "size_bytes", name=op.f("pk_op_rollup")
        ),
    )
    op.create_table(
        "process_group",
        sa.Column("run_id", sa.String(length=128), nullable=False),
        sa.Column("attempt", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("group", sa.String(length=256), nullable=False),
        sa.Column("ranks", sa.Text(), server_default="[]", nullable=False),
        sa.Column("backend", sa.Text(), server_default="", nullable=False),
        sa.Column("description", sa.Text(), server_default="", nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt", "group", name=op.f("pk_process_group")),
    )
    op.create_table(
        "producer",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("run_id", sa.String(length=128), nullable=False),
        sa.Column("producer", sa.String(length=256), nullable=False),
        sa.Column("host", sa.Text(), server_default="", nullable=False),
        sa.Column("first_sequence", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("last_sequence", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("received", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("refused", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("received_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_producer")),
        sa.UniqueConstraint("run_id", "producer", name=op.f("uq_producer_run_id_producer")),
    )
    op.create_table(
        "rank",
        sa.Column("run_id", sa.String(length=128), nullable=False),
        sa.Column("attempt", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("host", sa.Text(), server_default="", nullable=False),
        sa.Column("node_rank", sa.BigInteger(), nullable=True),
        sa.Column("local_rank", sa.BigInteger(), nullable=True),
        sa.Column("local_world_size", sa.BigInteger(), nullable=True),
        sa.Column("world_size", sa.BigInteger(), nullable=True),
        sa.Column("pid", sa.BigInteger(), nullable=True),
        sa.Column("role", sa.Text(), server_default="", nullable=False),
        sa.Column("backend", sa.Text(), server_default="", nullable=False),
        sa.Column("sources", sa.Text(), server_default="{}", nullable=False),
        sa.Column("stage", sa.BigInteger(), server_default="-1", nullable=False),
        sa.Column("num_stages", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("num_microbatches", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("schedule", sa.Text(), server_default="", nullable=False),
        sa.Column("registered_ns", sa.BigInteger(), nullable=True),
        sa.Column("first_seen_ns", sa.BigInteger(), nullable=True),
        sa.Column("last_seen_ns", sa.BigInteger(), nullable=True),
        sa.Column("received_ns", sa.BigInteger(), nullable=True),
        sa.Column("step", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("ended_ns", sa.BigInteger(), nullable=True),
        sa.Column("end_reason", sa.Text(), nullable=True),
        sa.Column("exit_code", sa.BigInteger(), nullable=True),
        sa.Column("exit_signal", sa.BigInteger(), nullable=True),
        sa.Column("end_detail", sa.Text(), server_default="", nullable=False),
        sa.Column("state", sa.Text(), nullable=True),
        sa.Column("state_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt", "rank", name=op.f("pk_rank")),
    )
    op.create_table(
        "run",
        sa.Column("run_id", sa.String(length=128), nullable=False),
        sa.Column("name", sa.Text(), server_default="", nullable=False),
        sa.Column("command", sa.Text(), server_default="[]", nullable=False),
        sa.Column("launcher", sa.Text(), server_default="", nullable=False),
        sa.Column("tags", sa.Text(), server_default="{}", nullable=False),
        sa.Column("world_size", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("attempt", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("step", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("started_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("last_seen_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("received_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("ended_ns", sa.BigInteger(), nullable=True),
        sa.Column("status", sa.Text(), server_default="starting", nullable=False),
        sa.Column("status_text", sa.Text(), server_default="", nullable=False),
        sa.Column("answer", sa.Text(), nullable=True),
        sa.Column("verdict", sa.Text(), nullable=True),
        sa.Column("detectors", sa.Text(), server_default="[]", nullable=False),
        sa.Column("log_lines", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("refused", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("version", sa.BigInteger(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_run")),
    )
    op.create_index("ix_run_started_ns", "run", ["started_ns"], unique=False)
    op.create_table(
        "stacks",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("run_id", sa.String(length=128), nullable=False),
        sa.Column("attempt", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("rank", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("time_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("reason", sa.Text(), server_default="", nullable=False),
        sa.Column("text", sa.Text(), server_default="", nullable=False),
        sa.Column("command_id", sa.BigInteger(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_stacks")),
    )
    op.create_index("ix_stacks_run_id_rank", "stacks", ["run_id", "rank"], unique=False)
    op.create_table(
        "command",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("run_id", sa.String(length=128), nullable=False),
        sa.Column("attempt", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("asked_by", sa.Text(), server_default="", nullable=False),
        sa.Column("finding_id", sa.BigInteger(), nullable=True),
        sa.Column("num_steps", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("at_step", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("is_everyone", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("created_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("expires_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_command")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_command_run_id_expires_ns", "command", ["run_id", "expires_ns"], unique=False
    )
    op.create_table(
        "command_rank",
        sa.Column("command_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), server_default="", nullable=False),
        sa.Column("updated_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("trace_bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("operators", sa.Text(), server_default="[]", nullable=False),
        sa.PrimaryKeyConstraint("command_id", "rank", name=op.f("pk_command_rank")),
    )
    op.create_table(
        "trace_part",
        sa.Column("command_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("offset", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("total", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("command_id", "rank", "offset", name=op.f("pk_trace_part")),
    )
    op.create_table(
        "sample_span",
        sa.Column("run_id", sa.String(length=128), nullable=False),
        sa.Column("host", sa.String(length=255), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("time_lo_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("time_hi_ns", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("count", sa.BigInteger(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("run_id", "host", "kind", name=op.f("pk_sample_span")),
    )
    op.create_table(
        "step_tile",
        sa.Column("run_id", sa.String(length=128), nullable=False),
        sa.Column("metric", sa.String(length=32), nullable=False),
        sa.Column("step_block", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("rank_block", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint(
            "run_id", "metric", "step_block", "rank_block", "attempt", name=op.f("pk_step_tile")
        ),
    )
    if op.get_bind().dialect.name == "sqlite":
        # Trigrams of the distinct words of a block; detail=none: only which block, not where.
        op.execute(
            "CREATE VIRTUAL TABLE log_index USING fts5("
            "terms, content='', tokenize='trigram case_sensitive 1', detail='none')"
        )


def downgrade() -> None:
    """Drop the tables."""
    if op.get_bind().dialect.name == "sqlite":
        op.execute("DROP TABLE log_index")
    op.drop_table("step_tile")
    op.drop_table("sample_span")
    op.drop_index("ix_stacks_run_id_rank", table_name="stacks")
    op.drop_table("stacks")
    op.drop_table("trace_part")
    op.drop_table("command_rank")
    op.drop_table("command")
    op.drop_index("ix_run_started_ns", table_name="run")
    op.drop_table("run")
    op.drop_table("rank")
    op.drop_table("producer")
    op.drop_table("process_group")
    op.drop_table("op_rollup")
    op.drop_table("metric")
    op.drop_table("loss")
    op.drop_index("ix_log_block_run_id_time_hi_ns", table_name="log_block")
    op.drop_index("ix_log_block_run_id_sealed", table_name="log_block")
    op.drop_table("log_block")
    op.drop_index("ix_finding_event_finding_id", table_name="finding_event")
    op.drop_table("finding_event")
    op.drop_index("ix_finding_run_id_key", table_name="finding")
    op.drop_table("finding")
    op.drop_index("ix_event_run_id", table_name="event")
    op.drop_table("event")
    op.drop_index("ix_error_event_run_id_fingerprint", table_name="error_event")
    op.drop_table("error_event")
    op.drop_table("environment")
    op.drop_index("ix_chunk_run_id_kind_time_hi_ns", table_name="chunk")
    op.drop_index("ix_chunk_run_id_kind_rank_step_hi", table_name="chunk")
    op.drop_index("ix_chunk_batch_id", table_name="chunk")
    op.drop_table("chunk")
    op.drop_table("clock_offset")
    op.drop_index("ix_batch_run_id_id", table_name="batch")
    op.drop_table("batch")
    op.drop_table("attempt")
