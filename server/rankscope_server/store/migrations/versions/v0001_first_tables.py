"""The first tables. Databases of before there was a second version are found by this revision."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from rankscope_server.store.migrations.columns import blob, number, run, run_key, serial, text, word

revision = "788e2c394a6a"
down_revision = None
# Trigrams of the distinct words of a block; detail=none: only which block, not where.
_INDEX = (
    "CREATE VIRTUAL TABLE log_index USING fts5("
    "terms, content='', tokenize='trigram case_sensitive 1', detail='none')"
)


def upgrade() -> None:
    """Make the tables."""
    _runs()
    _collected()
    _logs_and_findings()
    _asked()
    if op.get_bind().dialect.name == "sqlite":
        op.execute(_INDEX)


def _runs() -> None:
    """Make the tables of what a run is: its attempts, ranks, groups and environments."""
    op.create_table(
        "run",
        run_key(), text("name"), text("command", "[]"), text("launcher"), text("tags", "{}"),
        number("world_size"), number("attempt"), number("step"), number("started_ns"),
        number("last_seen_ns"), number("received_ns"), number("ended_ns", None),
        text("status", "starting"), text("status_text"), text("answer", None),
        text("verdict", None), text("detectors", "[]"), number("log_lines"), number("refused"),
        number("version"),
    )  # fmt: skip
    op.create_index("ix_run_started_ns", "run", ["started_ns"])
    op.create_table(
        "attempt",
        run_key(), number("attempt", is_key=True), number("started_ns"), number("last_seen_ns"),
        number("world_size"), number("step_lo", None), number("step_hi", None),
    )  # fmt: skip
    op.create_table(
        "rank",
        run_key(), number("attempt", is_key=True), number("rank", is_key=True), text("host"),
        number("node_rank", None), number("local_rank", None), number("local_world_size", None),
        number("world_size", None), number("pid", None), text("role"), text("backend"),
        text("sources", "{}"), number("stage", -1), number("num_stages"),
        number("num_microbatches"), text("schedule"), number("registered_ns", None),
        number("first_seen_ns", None), number("last_seen_ns", None), number("received_ns", None),
        number("step"), number("ended_ns", None), text("end_reason", None),
        number("exit_code", None), number("exit_signal", None), text("end_detail"),
        text("state", None), number("state_ns"),
    )  # fmt: skip
    op.create_table(
        "process_group",
        run_key(), number("attempt", is_key=True), word("group", 256, is_key=True),
        text("ranks", "[]"), text("backend"), text("description"),
    )  # fmt: skip
    op.create_table(
        "environment",
        run_key(), number("attempt", is_key=True), number("rank", is_key=True), number("time_ns"),
        blob("facts"),
    )  # fmt: skip
    op.create_table(
        "clock_offset",
        run_key(), word("host", 256, is_key=True), number("time_ns", is_key=True),
        number("offset_ns"), number("band_ns"),
    )  # fmt: skip
    op.create_table(
        "loss",
        run_key(), number("producer_id", is_key=True), number("rank", is_key=True),
        word("source", 64, is_key=True), word("reason", 256, is_key=True), text("host"),
        number("count"), number("time_ns"),
    )  # fmt: skip


def _collected() -> None:
    """Make the tables of what collectors sent, and its sums."""
    op.create_table(
        "producer",
        serial(), run(), word("producer", 256), text("host"), number("first_sequence"),
        number("last_sequence"), number("received"), number("refused"), number("bytes"),
        number("received_ns"), sa.UniqueConstraint("run_id", "producer"),
    )  # fmt: skip
    op.create_table(
        "batch",
        serial(), number("producer_id"), number("sequence"), run(), number("received_ns"),
        blob("records", is_nullable=True), sa.UniqueConstraint("producer_id", "sequence"),
    )  # fmt: skip
    op.create_index("ix_batch_run_id_id", "batch", ["run_id", "id"])
    op.create_table(
        "chunk",
        serial(), run(), number("batch_id"), word("kind", 32), number("attempt"), number("rank"),
        text("host"), number("step_lo"), number("step_hi"), number("time_lo_ns"),
        number("time_hi_ns"), number("count"), number("max_duration_ns", -1), blob("data"),
    )  # fmt: skip
    op.create_index("ix_chunk_batch_id", "chunk", ["batch_id"])
    op.create_index(
        "ix_chunk_run_id_kind_rank_step_hi", "chunk",
        ["run_id", "kind", "rank", "step_hi"],
    )  # fmt: skip
    op.create_index("ix_chunk_run_id_kind_time_hi_ns", "chunk", ["run_id", "kind", "time_hi_ns"])
    op.create_table(
        "sample_span",
        run_key(), word("host", 255, is_key=True), word("kind", 32, is_key=True),
        number("time_lo_ns"), number("time_hi_ns"), number("count"),
    )  # fmt: skip
    op.create_table(
        "step_tile",
        run_key(), word("metric", 32, is_key=True), number("step_block", is_key=True),
        number("rank_block", is_key=True), number("attempt", is_key=True), blob("data"),
    )  # fmt: skip
    op.create_table(
        "op_rollup",
        run_key(), number("attempt", is_key=True), word("operation", 64, is_key=True),
        word("group", 256, is_key=True), number("size_bytes", is_key=True), number("count"),
        number("open"), number("sum_ns"), number("min_ns", None), number("max_ns", None),
        number("blocked_ns"), blob("histogram"),
    )  # fmt: skip
    op.create_table(
        "metric",
        run_key(), word("name", 256, is_key=True), number("rank", is_key=True),
        number("step", is_key=True), number("attempt", is_key=True), number("time_ns"),
        sa.Column("value", sa.Double),
    )  # fmt: skip


def _logs_and_findings() -> None:
    """Make the tables of lines, errors, events, findings."""
    op.create_table(
        "log_block",
        serial(), run(), number("sealed"), number("count"), number("time_lo_ns"),
        number("time_hi_ns"), number("level_hi"), blob("head"), blob("body"),
        sqlite_autoincrement=True,
    )  # fmt: skip
    op.create_index("ix_log_block_run_id_sealed", "log_block", ["run_id", "sealed"])
    op.create_index("ix_log_block_run_id_time_hi_ns", "log_block", ["run_id", "time_hi_ns"])
    op.create_table(
        "error_event",
        serial(), run(), word("fingerprint", 64), number("attempt"), number("rank"),
        number("time_ns"), number("step"), text("type"), text("message"), text("traceback"),
        text("place"),
    )  # fmt: skip
    op.create_index("ix_error_event_run_id_fingerprint", "error_event", ["run_id", "fingerprint"])
    op.create_table(
        "event",
        serial(), run(), number("attempt"), number("rank"), number("time_ns"), number("step"),
        text("name"), text("fields", "{}"),
    )  # fmt: skip
    op.create_index("ix_event_run_id", "event", ["run_id"])
    op.create_table(
        "finding",
        serial(), run(), number("attempt"), word("key", 512), word("state", 16),
        number("opened_ns"), number("updated_ns"), number("recovered_ns", None), text("body"),
        sqlite_autoincrement=True,
    )  # fmt: skip
    op.create_index("ix_finding_run_id_key", "finding", ["run_id", "key"])
    op.create_table(
        "finding_event",
        serial(), number("finding_id"), number("time_ns"), word("event", 32), text("text"),
    )  # fmt: skip
    op.create_index("ix_finding_event_finding_id", "finding_event", ["finding_id"])


def _asked() -> None:
    """Make the tables of what was asked of agents, and preflights."""
    op.create_table(
        "stacks",
        serial(), run(), number("attempt"), number("rank"), number("time_ns"), text("reason"),
        text("text"), number("command_id"),
    )  # fmt: skip
    op.create_index("ix_stacks_run_id_rank", "stacks", ["run_id", "rank"])
    op.create_table(
        "command",
        serial(), run(), number("attempt"), word("kind", 32), text("asked_by"),
        number("finding_id", None), number("num_steps"), number("at_step"), number("is_everyone"),
        number("created_ns"), number("expires_ns"), sqlite_autoincrement=True,
    )  # fmt: skip
    op.create_index("ix_command_run_id_expires_ns", "command", ["run_id", "expires_ns"])
    op.create_table(
        "command_rank",
        number("command_id", is_key=True), number("rank", is_key=True), word("state", 16),
        text("reason"), number("updated_ns"), number("trace_bytes"), text("operators", "[]"),
    )  # fmt: skip
    op.create_table(
        "trace_part",
        number("command_id", is_key=True), number("rank", is_key=True),
        number("offset", is_key=True), number("total"), blob("data"),
    )  # fmt: skip
    op.create_table(
        "preflight",
        word("id", 64, is_key=True), word("run_id", 128, default=""), text("key"), text("token"),
        text("coordinated"), text("nodes", "[]"), number("num_nodes"), number("created_ns"),
        number("expires_ns"), number("finished_ns"), text("status", "unknown"),
        number("num_failures"), number("num_warnings"), blob("verdict", is_nullable=True),
    )  # fmt: skip
    op.create_index("ix_preflight_created_ns", "preflight", ["created_ns"])
    op.create_index("ix_preflight_run_id", "preflight", ["run_id"])
    op.create_table(
        "preflight_node",
        word("preflight_id", 64, is_key=True), word("node", 255, is_key=True),
        word("host", 255, default=""), number("node_rank", -1), text("observed"),
        number("joined_ns"), text("status", "unknown"), text("findings", "[]"),
        blob("report", is_nullable=True),
    )  # fmt: skip
    op.create_index("ix_preflight_node_host", "preflight_node", ["host"])
    op.create_index("ix_preflight_node_node", "preflight_node", ["node"])
