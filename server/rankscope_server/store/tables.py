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
DEFAULT_PROJECT = "default"  # of what came with no token, or with one of all projects
# SQLite numbers rows by itself only where the key is spelled INTEGER.
Serial = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _run_key() -> sa.Column[str]:
    return sa.Column("run_id", sa.String(128), primary_key=True)


def _run() -> sa.Column[str]:
    return sa.Column("run_id", sa.String(128), nullable=False)


def _project() -> sa.Column[str]:
    return sa.Column("project", sa.String(64), nullable=False, server_default=DEFAULT_PROJECT)


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
    _text("trackers", "{}"),  # JSON: by tracker, the run of it that ranks log to
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
    _text("cost", None),  # JSON: where the time of its ranks went, as of the last look but few
    _number("log_lines"),
    _number("refused"),
    _number("version"),  # grows with every stored change: the ETag of what is derived
    _project(),
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
    # zstd of the records, one msgpack list, to rebuild the analysis; no logs, no states, and not
    # what is in `journal`
    sa.Column("records", sa.LargeBinary),
    sa.UniqueConstraint("producer_id", "sequence"),
    sa.Index("ix_batch_run_id_id", "run_id", "id"),
)

# What an analysis reads again of a batch and what goes by age: zstd of msgpack, the places among
# all that it reads of the batch, and the records.
journal = sa.Table(
    "journal",
    metadata,
    _number("batch_id", key=True),
    sa.Column("kind", sa.String(32), primary_key=True),  # events, numbers
    _run(),
    sa.Column("records", sa.LargeBinary, nullable=False),
    sa.Index("ix_journal_run_id_kind_batch_id", "run_id", "kind", "batch_id"),
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
    _number("rank_hi", -1),  # the last of its ranks; `rank` is the first
    # where `data` is empty: the object that has it, from which byte on, how many (store/blobs.py)
    _text("object", None),
    _number("start"),
    _number("num_bytes"),
    _number("crc32"),
    _number("row_group", -1),  # of a segment; else these bytes are a chunk
    _number("first_id"),  # of the chunks that a row group took the place of; `id` is their last
    sa.Index("ix_chunk_run_id_kind_rank_step_hi", "run_id", "kind", "rank", "step_hi"),
    # the chunks of all ranks in a range of steps, newest first, before any of them is read
    sa.Index("ix_chunk_run_id_kind_step_hi_step_lo", "run_id", "kind", "step_hi", "step_lo"),
    sa.Index("ix_chunk_run_id_kind_time_hi_ns", "run_id", "kind", "time_hi_ns"),
    sa.Index("ix_chunk_batch_id", "batch_id"),
)
_IN_OBJECT = chunk.c.object.is_not(None)  # no entry of the index where chunks are in their rows
sa.Index("ix_chunk_object", chunk.c.object, sqlite_where=_IN_OBJECT, postgresql_where=_IN_OBJECT)

# whose objects are those of this database, where several share a store of objects
object_owner = sa.Table(
    "object_owner",
    metadata,
    _number("number", key=True),  # 1
    _text("owner"),
)

# Parquet files that took the place of chunks (store/segments.py); rows of `chunk` are row groups
segment = sa.Table(
    "segment",
    metadata,
    sa.Column("object", sa.Text, primary_key=True),
    _run(),
    sa.Column("kind", sa.String(32), nullable=False),
    _number("version"),
    _number("count"),
    _number("num_bytes"),
    _number("footer_start"),
    _number("footer_crc32"),
    sa.Index("ix_segment_run_id", "run_id"),
)

# objects that no row names any more
dropped_object = sa.Table(
    "dropped_object",
    metadata,
    sa.Column("object", sa.Text, primary_key=True),
    _number("due_ns"),  # until then a page that began before may read it
)

# from when to when a machine sent samples of a kind, and how busy it was (store/spans.py)
sample_span = sa.Table(
    "sample_span",
    metadata,
    _run_key(),
    sa.Column("host", sa.String(255), primary_key=True),
    sa.Column("kind", sa.String(32), primary_key=True),
    _number("time_lo_ns"),
    _number("time_hi_ns"),
    _number("count"),
    _number("known_us"),  # of a host, or of all its GPUs
    _number("busy_us"),  # of that
    _number("counter_us", -1),
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

log_word = sa.Table(
    "log_word",
    metadata,
    sa.Column("id", Serial, primary_key=True, autoincrement=True),
    _run(),
    sa.Column("word", sa.Text, nullable=False),  # a host, a logger or a stream
    sa.UniqueConstraint("run_id", "word"),
)

log_kind = sa.Table(
    "log_kind",
    metadata,
    sa.Column("id", Serial, primary_key=True, autoincrement=True),
    _run(),
    _number("attempt"),
    _number("rank"),
    _number("level"),
    _number("logger"),  # its word
    _number("stream"),  # its word
    _number("has_step"),
    sa.UniqueConstraint("run_id", "attempt", "rank", "level", "logger", "stream", "has_step"),
    sqlite_autoincrement=True,
)

log_block = sa.Table(
    "log_block",
    metadata,
    # names its lines in links, also after blocks were joined: never given twice
    sa.Column("id", Serial, primary_key=True, autoincrement=True),
    _run(),
    _number("host"),  # its word: a block is of one host
    _number("sealed"),  # 0: may still be joined; 1: in the index; 2: full, too many words for it
    _number("count"),
    _number("first_row"),  # the first block in which lines of it came; 0: none before itself
    _number("time_lo_ns"),
    _number("time_hi_ns"),
    _number("step_lo"),  # of the lines whose step is known; 0: of none
    _number("step_hi"),
    _number("level_hi"),
    _number("num_bytes"),  # of its row in `log_lines`
    sa.Column("tally", sa.LargeBinary, nullable=False),  # how many lines of which kind
    sa.Index("ix_log_block_run_id_time_hi_ns_sealed", "run_id", "time_hi_ns", "sealed"),
    sa.Index("ix_log_block_run_id_time_lo_ns_sealed", "run_id", "time_lo_ns", "sealed"),
    sa.Index("ix_log_block_run_id_id", "run_id", "id"),
    sa.Index("ix_log_block_run_id_sealed_host", "run_id", "sealed", "host"),
    sa.Index("ix_log_block_time_hi_ns", "time_hi_ns"),
    sqlite_autoincrement=True,
)

log_lines = sa.Table(
    "log_lines",
    metadata,
    _number("block_id", key=True),
    sa.Column("head", sa.LargeBinary, nullable=False),  # columns: time, rank, level, logger ...
    sa.Column("body", sa.LargeBinary, nullable=False),  # messages and fields
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
    _number("batch_id"),  # in which it came
    sa.Index("ix_metric_run_id_batch_id", "run_id", "batch_id"),
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
    _project(),
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

# --- retention: what is kept, what goes, what is gone

# runs that retention and deletion never touch
pin = sa.Table("pin", metadata, _run_key(), _number("pinned_ns"))

# Runs that were deleted, or are being deleted: their batches are refused from the first moment.
deletion = sa.Table(
    "deletion",
    metadata,
    _run_key(),
    _text("name"),
    _text("reason"),
    _number("asked_ns"),
    _number("finished_ns", None),
    _number("rows"),  # removed by now
    _number("bytes"),
    _number("rows_at_start"),
    _number("bytes_at_start"),
)

# what retention took from a run that is still there
removal = sa.Table(
    "removal",
    metadata,
    _run_key(),
    sa.Column("kind", sa.String(32), primary_key=True),
    _number("rows"),
    _number("bytes"),
    _number("received_before_ns"),  # all that came before this is gone
    _number("removed_ns"),
)

# The largest ids at a time: how old a row is by this server's clock, whatever its sender's says.
received_mark = sa.Table(
    "received_mark",
    metadata,
    _number("time_ns", key=True),
    _number("chunk_id"),
    _number("log_block_id"),
    _number("event_id"),
    _number("stacks_id"),
    _number("command_id"),
    _number("batch_id"),
)

# how much is stored of each kind and run; of large tables all rows up to `counted_id`
stored_size = sa.Table(
    "stored_size",
    metadata,
    _run_key(),
    sa.Column("kind", sa.String(32), primary_key=True),
    _number("rows"),
    _number("bytes"),
    _number("run_version"),  # that of the run when it was counted
    _number("counted_ns"),
)
size_counted = sa.Table(
    "size_counted",
    metadata,
    sa.Column("source", sa.String(32), primary_key=True),
    _number("counted_id"),
)

alert_channel = sa.Table(
    "alert_channel",
    metadata,
    sa.Column("id", Serial, primary_key=True, autoincrement=True),
    sa.Column("name", sa.String(128), nullable=False, unique=True),
    sa.Column("kind", sa.String(32), nullable=False),
    _number("is_enabled", 1),
    _text("body", "{}"),  # JSON, what may be shown
    _text("secrets", "{}"),  # JSON, what never leaves
    _text("quiet", "null"),  # JSON
    _number("created_ns"),
    _number("updated_ns"),
    _number("is_from_file"),  # of the server
    sqlite_autoincrement=True,  # rules name them: never given twice
)

alert_rule = sa.Table(
    "alert_rule",
    metadata,
    sa.Column("id", Serial, primary_key=True, autoincrement=True),
    sa.Column("name", sa.String(128), nullable=False, unique=True),
    _text("body", "{}"),  # JSON of the rule
    _number("created_ns"),
    _number("updated_ns"),
    _number("is_from_file"),  # of the server
    sqlite_autoincrement=True,
)

alert = sa.Table(
    "alert",
    metadata,
    sa.Column("id", Serial, primary_key=True, autoincrement=True),
    sa.Column("uid", sa.String(64), nullable=False, unique=True),  # among all servers
    # of its rule and subject while it is open, else null: one alert for one problem
    sa.Column("open_key", sa.String(640), unique=True),
    _number("rule_id"),
    _text("rule_name"),
    sa.Column("subject", sa.String(512), nullable=False),
    sa.Column("run_id", sa.String(128), nullable=False, server_default=""),  # empty: the server
    _text("run_name"),
    sa.Column("state", sa.String(16), nullable=False),  # open, recovered, closed
    sa.Column("severity", sa.String(16), nullable=False),
    _text("what"),
    _text("why"),
    _text("next"),
    _text("path"),  # of the page, relative to the dashboard's root
    _text("facts", "[]"),  # JSON: a change of these is worth a message
    _number("opened_ns"),
    _number("updated_ns"),
    _number("notified_ns"),
    _number("ended_ns", None),
    _text("end_reason"),
    sa.Index("ix_alert_state", "state"),
    sqlite_autoincrement=True,
)

alert_delivery = sa.Table(
    "alert_delivery",
    metadata,
    sa.Column("id", Serial, primary_key=True, autoincrement=True),
    sa.Column("uid", sa.String(64), nullable=False, unique=True),  # idempotency key
    _number("alert_id"),  # 0: a test
    _number("channel_id"),
    _text("channel_name"),
    sa.Column("event", sa.String(16), nullable=False),  # opened, changed, recovered, closed, test
    _text("message", "{}"),  # JSON
    sa.Column("state", sa.String(16), nullable=False),  # pending, sent, given_up, dropped, skipped
    _number("attempts"),
    _number("created_ns"),
    _number("next_ns"),  # not before this time
    _number("ended_ns", None),
    _text("note"),  # why it waits, or why it was not sent
    sa.Index("ix_alert_delivery_state", "state"),
    sa.Index("ix_alert_delivery_alert_id", "alert_id"),
    sqlite_autoincrement=True,
)

advice = sa.Table(
    "advice",
    metadata,
    _run_key(),
    _number("epoch", key=True),
    _number("given_ns"),
    _text("body", "{}"),  # JSON
)

advice_report = sa.Table(
    "advice_report",
    metadata,
    sa.Column("id", Serial, primary_key=True, autoincrement=True),
    _run(),
    _number("epoch"),
    _number("time_ns"),
    _text("controller"),
    sa.Column("outcome", sa.String(16), nullable=False),  # done, refused, failed, ignored
    _text("text"),
    sa.Index("ix_advice_report_run_id", "run_id"),
)

token = sa.Table(
    "token",
    metadata,
    sa.Column("id", sa.String(16), primary_key=True),  # stands in the token itself
    _text("hash"),  # scrypt of the secret part, with its salt and costs
    _text("name"),
    _project(),  # * for all
    _text("roles"),  # separated by commas
    _number("bytes_per_second"),  # quota of request bodies; 0: none
    _number("created_ns"),
    _text("created_by"),
    _number("expires_ns", None),
    _number("revoked_ns", None),
    _number("used_ns", None),  # within a minute
    _number("events_per_second"),  # quota of records and events of chunks; 0: none
)

session = sa.Table(
    "session",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),  # SHA-256 of the cookie
    sa.Column("token_id", sa.String(16), nullable=False),  # empty: of RANKSCOPE_TOKEN
    _text("proof"),  # of RANKSCOPE_TOKEN, so that another one ends the session
    _number("created_ns"),
    _number("expires_ns"),
    # of a person whom an issuer named; empty: of a token. `proof` marks the rules then.
    _text("holder"),
    _text("roles"),  # separated by commas
    _project(),
    sa.Index("ix_session_expires_ns", "expires_ns"),
)

# sign-ins that were begun at an issuer
oidc_login = sa.Table(
    "oidc_login",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),  # SHA-256 of its state
    _text("browser"),  # SHA-256 of the cookie that goes with it
    _text("nonce"),
    _text("verifier"),
    _text("path"),  # where to go afterwards
    _number("expires_ns"),
    sa.Index("ix_oidc_login_expires_ns", "expires_ns"),
)

audit = sa.Table(
    "audit",
    metadata,
    sa.Column("id", Serial, primary_key=True, autoincrement=True),
    _number("time_ns"),
    _project(),
    _text("who"),
    _text("address"),
    sa.Column("action", sa.String(128), nullable=False),
    _text("target"),
    _text("detail"),
    _number("count", 1),  # of equal things in a row: failed tries of one address
    sa.Index("ix_audit_project_id", "project", "id"),
    sqlite_autoincrement=True,
)

saved_search = sa.Table(
    "saved_search",
    metadata,
    sa.Column("id", Serial, primary_key=True, autoincrement=True),
    sa.Column("name", sa.String(128), nullable=False),
    sa.Column("q", sa.Text, nullable=False),
    _number("created_ns"),
    _project(),  # whose it is; * for those who see all
    sa.UniqueConstraint("project", "name"),
    sqlite_autoincrement=True,  # ids name them in links
)

saved_view = sa.Table(
    "saved_view",
    metadata,
    sa.Column("id", Serial, primary_key=True, autoincrement=True),
    sa.Column("name", sa.String(128), nullable=False),
    sa.Column("address", sa.Text, nullable=False),  # from the root; of every run where its run is *
    _number("created_ns"),
    _project(),  # as of a search
    sa.UniqueConstraint("project", "name"),
    sqlite_autoincrement=True,
)

# --- what the analysis of a live run knows: a restarted server reads on from there

analysis_state = sa.Table(
    "analysis_state",
    metadata,
    _run_key(),
    sa.Column("code", sa.String(64), nullable=False),  # that wrote it: another one reads all again
    _number("last_batch"),  # all up to this one are in it
    _number("saved_ns"),
    _text("parts", "[]"),  # JSON: digests of its large arrays, in their order
    sa.Column("data", sa.LargeBinary, nullable=False),
)

analysis_part = sa.Table(
    "analysis_part",
    metadata,
    _run_key(),
    sa.Column("digest", sa.String(64), primary_key=True),
    sa.Column("data", sa.LargeBinary, nullable=False),
)

# --- several server processes on one database: which of them are up, and which does what

server = sa.Table(
    "server",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),  # of one life of a process
    _text("name"),  # host and process, for people
    _number("expires_ns"),  # clock of the database: until then it counts as up
    _number("behind_ms"),  # for how long what is stored waits for its analysis
    sa.Column("queue_ratio", sa.Double, nullable=False, server_default="0"),
    _text("says", "{}"),  # JSON: how the work goes of which it holds the leases
    _text("role", "all"),  # what it does, where there is a log
)

lease = sa.Table(
    "lease",
    metadata,
    sa.Column("name", sa.String(160), primary_key=True),
    sa.Column("run_id", sa.String(128), nullable=False, server_default=""),  # empty: of no run
    sa.Column("owner", sa.String(32), nullable=False, server_default=""),  # empty: given back
    _number("epoch"),  # grows with every owner: what an earlier one still writes is refused
    _number("applied"),  # of a partition of the log: up to here it is in the store
)
sa.Index("ix_lease_run_id", lease.c.run_id)
