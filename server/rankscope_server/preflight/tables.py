"""The tables of preflight; reports and verdicts lie in them as zstd of their JSON."""

from __future__ import annotations

import sqlalchemy as sa

from rankscope_server.store.tables import metadata


def _number(name: str, default: int = 0) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False, server_default=str(default))


def _text(name: str, default: str = "") -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False, server_default=default)


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
    _text("status", "unknown"),  # ok, warn, fail; unknown: not judged, or only in part
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
