"""The tables, in SQLAlchemy Core; the migrations in `migrations/` build exactly these.

Times are nanoseconds since the epoch. Dense data is in blobs with index columns beside them,
so that reading a page touches few rows.
"""

from __future__ import annotations

import sqlalchemy as sa

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}
metadata = sa.MetaData(naming_convention=NAMING)
# SQLite numbers rows by itself only where the key is spelled INTEGER.
Serial = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _run_key() -> sa.Column[str]:
    return sa.Column("run_id", sa.String(128), primary_key=True)


def _run() -> sa.Column[str]:
    return sa.Column("run_id", sa.String(128), nullable=False)


def _number(name: str, default: int | None = 0, key: bool = False) -> sa.Column[int]:
    if key:
        return sa.Column(name, sa.BigInteger, primary_key=True, autoincrement=False)
    if default is None:
        return sa.Column(name, sa.BigInteger)
    return sa.Column(name, sa.BigInteger, nullable=False, server_default=str(default))


def _text(name: str, default: str | None = "") -> sa.Column[str]:
    if default is None:
        return sa.Column(name, sa.Text)
    return sa.Column(name, sa.Text, nullable=False, server_default=default)


run = sa.Table(
    "run",
    metadata,
    _run_key(),
    _text("name"),
    _text("command", "[]"),  # JSON list
    _text("launcher"),
    _text("tags", "{}"),
    _number("world_size"),
    _number("attempt"),  # the newest one
    _number("step"),  # the largest one seen
    _number("started_ns"),
    _number("last_seen_ns"),  # clock of the sender
    _number("received_ns"),  # clock of the server: the last batch
    _number("ended_ns", None),
    _text("status", "starting"),
    _text("status_text"),
    _text("answer", None),  # JSON, the last one that the analysis gave
    _text("verdict", None),  # JSON
    _text("detectors", "[]"),  # JSON
    _number("log_lines"),
    _number("refused"),
    _number("version"),  # grows with every stored change: the ETag of what is derived
)
sa.Index("ix_run_started_ns", run.c.started_ns)

attempt = sa.Table(
    "attempt",
    metadata,
    _run_key(),
    _number("attempt", key=True),
    _number("started_ns"),
    _number("last_seen_ns"),
    _number("world_size"),
    _number("step_lo", None),
    _number("step_hi", None),
)

rank = sa.Table(
    "rank",
    metadata,
    _run_key(),
    _number("attempt", key=True),
    _number("rank", key=True),
    _text("host"),
    _number("node_rank", None),
    _number("local_rank", None),
    _number("local_world_size", None),
    _number("world_size", None),
    _number("pid", None),
    _text("role"),
    _text("backend"),
    _text("sources", "{}"),
    _number("stage", -1),
    _number("num_stages"),
    _number("num_microbatches"),
    _text("schedule"),
    _number("registered_ns", None),
    _number("first_seen_ns", None),
    _number("last_seen_ns", None),
    _number("received_ns", None),
    _number("step"),
    _number("ended_ns", None),
    _text("end_reason", None),
    _number("exit_code", None),
    _number("exit_signal", None),
    _text("end_detail"),
    _text("state", None),  # JSON of the newest RankState
    _number("state_ns"),
)

process_group = sa.Table(
    "process_group",
    metadata,
    _run_key(),
    _number("attempt", key=True),
    sa.Column("group", sa.String(256), primary_key=True),
    _text("ranks", "[]"),
    _text("backend"),
    _text("description"),
)

environment = sa.Table(
    "environment",
    metadata,
    _run_key(),
    _number("attempt", key=True),
    _number("rank", key=True),
    _number("time_ns"),
    sa.Column("facts", sa.LargeBinary, nullable=False),  # zstd of JSON
)

producer = sa.Table(
    "producer",
    metadata,
    sa.Column("id", Serial, primary_key=True, autoincrement=True),
    _run(),
    sa.Column("producer", sa.String(256), nullable=False),
    _text("host"),
    _number("first_sequence"),
    _number("last_sequence"),
    _number("received"),  # batches stored: fewer than last_sequence says how many are missing
    _number("refused"),
    _number("bytes"),
    _number("received_ns"),
    sa.UniqueConstraint("run_id", "producer"),
)

batch = sa.Table(
    "batch",
    metadata,
    sa.Column("id", Serial, primary_key=True, autoincrement=True),
    _number("producer_id"),
    _number("sequence"),
    _run(),
    _number("received_ns"),
    # zstd of the records, one msgpack list, to rebuild the analysis; no logs, no states
    sa.Column("records", sa.LargeBinary),
    sa.UniqueConstraint("producer_id", "sequence"),
    sa.Index("ix_batch_run_id_id", "run_id", "id"),
)

chunk = sa.Table(
    "chunk",
    metadata,
    sa.Column("id", Serial, primary_key=True, autoincrement=True),
    _run(),
    _number("batch_id"),
    sa.Column("kind", sa.String(32), nullable=False),
    _number("attempt"),
    _number("rank"),
    _text("host"),
    _number("step_lo"),
    _number("step_hi"),
    _number("time_lo_ns"),
    _number("time_hi_ns"),
    _number("count"),
    _number("max_duration_ns", -1),
    sa.Column("data", sa.LargeBinary, nullable=False),
    sa.Index("ix_chunk_run_id_kind_rank_step_hi", "run_id", "kind", "rank", "step_hi"),
    # the chunks of all ranks in a range of steps, newest first, before any of them is read
    sa.Index("ix_chunk_run_id_kind_step_hi_step_lo", "run_id", "kind", "step_hi", "step_lo"),
    sa.Index("ix_chunk_run_id_kind_time_hi_ns", "run_id", "kind", "time_hi_ns"),
    sa.Index("ix_chunk_batch_id", "batch_id"),
)

# from when to when a machine sent samples of a kind
sample_span = sa.Table(
    "sample_span",
    metadata,
    _run_key(),
    sa.Column("host", sa.String(255), primary_key=True),
    sa.Column("kind", sa.String(32), primary_key=True),
    _number("time_lo_ns"),
    _number("time_hi_ns"),
    _number("count"),
)

step_tile = sa.Table(
    "step_tile",
    metadata,
    _run_key(),
    sa.Column("metric", sa.String(32), primary_key=True),
    _number("step_block", key=True),
    _number("rank_block", key=True),
    _number("attempt", key=True),
    sa.Column("data", sa.LargeBinary, nullable=False),
)

op_rollup = sa.Table(
    "op_rollup",
    metadata,
    _run_key(),
    _number("attempt", key=True),
    sa.Column("operation", sa.String(64), primary_key=True),
    sa.Column("group", sa.String(256), primary_key=True),
    _number("size_bytes", key=True),
    _number("count"),
    _number("open"),  # issued, end not seen
    _number("sum_ns"),
    _number("min_ns", None),
    _number("max_ns", None),
    _number("blocked_ns"),
    sa.Column("histogram", sa.LargeBinary, nullable=False),
)

log_block = sa.Table(
    "log_block",
    metadata,
    sa.Column("id", Serial, primary_key=True, autoincrement=True),
    _run(),
    _number("sealed"),  # 0 while lines are still added; only sealed blocks are in the index
    _number("count"),
    _number("time_lo_ns"),
    _number("time_hi_ns"),
    _number("level_hi"),
    sa.Column("head", sa.LargeBinary, nullable=False),  # what filters and counts need
    sa.Column("body", sa.LargeBinary, nullable=False),  # messages and fields
    sa.Index("ix_log_block_run_id_time_hi_ns", "run_id", "time_hi_ns"),
    sa.Index("ix_log_block_run_id_sealed", "run_id", "sealed"),
    sqlite_autoincrement=True,  # ids name lines in links: never given twice
)

error_event = sa.Table(
    "error_event",
    metadata,
    sa.Column("id", Serial, primary_key=True, autoincrement=True),
    _run(),
    sa.Column("fingerprint", sa.String(64), nullable=False),
    _number("attempt"),
    _number("rank"),
    _number("time_ns"),
    _number("step"),
    _text("type"),
    _text("message"),
    _text("traceback"),
    _text("place"),  # main, thread, training, collective, fatal_signal
    sa.Index("ix_error_event_run_id_fingerprint", "run_id", "fingerprint"),
)

finding = sa.Table(
    "finding",
    metadata,
    sa.Column("id", Serial, primary_key=True, autoincrement=True),
    _run(),
    _number("attempt"),
    sa.Column("key", sa.String(512), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),  # open, acknowledged, recovered
    _number("opened_ns"),
    _number("updated_ns"),
    _number("recovered_ns", None),
    _text("body"),  # JSON of the finding as the detector returned it
    sa.Index("ix_finding_run_id_key", "run_id", "key"),
    sqlite_autoincrement=True,
)

finding_event = sa.Table(
    "finding_event",
    metadata,
    sa.Column("id", Serial, primary_key=True, autoincrement=True),
    _number("finding_id"),
    _number("time_ns"),
    sa.Column("event", sa.String(32), nullable=False),
    _text("text"),
    sa.Index("ix_finding_event_finding_id", "finding_id"),
)

clock_offset = sa.Table(
    "clock_offset",
    metadata,
    _run_key(),
    sa.Column("host", sa.String(256), primary_key=True),
    _number("time_ns", key=True),  # clock of the host
    _number("offset_ns"),  # server minus host
    _number("band_ns"),  # wrong by at most so much
)

loss = sa.Table(
    "loss",
    metadata,
    _run_key(),
    _number("producer_id", key=True),
    _number("rank", key=True),
    sa.Column("source", sa.String(64), primary_key=True),
    sa.Column("reason", sa.String(256), primary_key=True),
    _text("host"),
    _number("count"),
    _number("time_ns"),
)

metric = sa.Table(
    "metric",
    metadata,
    _run_key(),
    sa.Column("name", sa.String(256), primary_key=True),
    _number("rank", key=True),
    _number("step", key=True),
    _number("attempt", key=True),
    _number("time_ns"),
    sa.Column("value", sa.Double),  # null: the script gave NaN or infinity
)

event = sa.Table(
    "event",
    metadata,
    sa.Column("id", Serial, primary_key=True, autoincrement=True),
    _run(),
    _number("attempt"),
    _number("rank"),
    _number("time_ns"),
    _number("step"),
    _text("name"),
    _text("fields", "{}"),
    sa.Index("ix_event_run_id", "run_id"),
)

stacks = sa.Table(
    "stacks",
    metadata,
    sa.Column("id", Serial, primary_key=True, autoincrement=True),
    _run(),
    _number("attempt"),
    _number("rank"),
    _number("time_ns"),
    _text("reason"),
    _text("text"),
    _number("command_id"),  # that asked for them; 0 for none
    sa.Index("ix_stacks_run_id_rank", "run_id", "rank"),
)

command = sa.Table(
    "command",
    metadata,
    sa.Column("id", Serial, primary_key=True, autoincrement=True),
    _run(),
    _number("attempt"),
    sa.Column("kind", sa.String(32), nullable=False),
    _text("asked_by"),  # user, or finding N
    _number("finding_id", None),
    _number("num_steps"),
    _number("at_step"),
    _number("is_everyone"),
    _number("created_ns"),
    _number("expires_ns"),
    sa.Index("ix_command_run_id_expires_ns", "run_id", "expires_ns"),
    sqlite_autoincrement=True,  # ids name commands to collectors: never given twice
)

command_rank = sa.Table(
    "command_rank",
    metadata,
    _number("command_id", key=True),
    _number("rank", key=True),
    sa.Column("state", sa.String(16), nullable=False),  # pending, sent, running, done, refused
    _text("reason"),
    _number("updated_ns"),
    _number("trace_bytes"),
    _text("operators", "[]"),  # JSON, of a trace
)

trace_part = sa.Table(
    "trace_part",
    metadata,
    _number("command_id", key=True),
    _number("rank", key=True),
    _number("offset", key=True),
    _number("total"),  # bytes of the whole trace
    sa.Column("data", sa.LargeBinary, nullable=False),
)

preflight = sa.Table(
    "preflight",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    # the training run that followed, or empty
    sa.Column("run_id", sa.String(128), nullable=False, server_default=""),
    _text("key"),  # agents that start with the same key meet in the same preflight
    _text("token"),  # of this preflight alone, void once it expires
    _text("coordinated"),  # server, or upload: it was coordinated otherwise
    _text("nodes", "[]"),  # JSON, names that were announced
    _number("num_nodes"),
    _number("created_ns"),
    _number("expires_ns"),
    _number("finished_ns"),  # 0: not yet
    _text("status", "unknown"),  # ok, warn, fail; unknown: no verdict, or only in part
    _number("num_failures"),
    _number("num_warnings"),
    sa.Column("verdict", sa.LargeBinary),
    sa.Index("ix_preflight_run_id", "run_id"),
    sa.Index("ix_preflight_created_ns", "created_ns"),
)
preflight_node = sa.Table(
    "preflight_node",
    metadata,
    sa.Column("preflight_id", sa.String(64), primary_key=True),
    sa.Column("node", sa.String(255), primary_key=True),
    sa.Column("host", sa.String(255), nullable=False, server_default=""),  # its own host name
    _number("node_rank", -1),
    _text("observed"),  # address from which it joined
    _number("joined_ns"),
    _text("status", "unknown"),
    _text("findings", "[]"),  # JSON, ids of those that name it
    sa.Column("report", sa.LargeBinary),
    sa.Index("ix_preflight_node_node", "node"),
    sa.Index("ix_preflight_node_host", "host"),
)
