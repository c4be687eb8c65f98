"""The list of runs and the summary of one."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa

from rankscope_server.answers import json_object, to_ms
from rankscope_server.api.runs.schema import Runs, RunSummary, ShortVerdict
from rankscope_server.problems import not_found
from rankscope_server.store import tables

MAX_LIMIT = 500
_STATUSES = ("starting", "running", "stuck", "ended", "failed", "silent")


def run_row(connection: sa.Connection, run_id: str) -> sa.Row[Any]:
    """Return the row of a run. Raises Problem 404."""
    row = None
    if "\x00" not in run_id:  # which some databases do not take even to compare
        found = sa.select(tables.run).where(tables.run.c.run_id == run_id)
        row = connection.execute(found).first()
    if row is None:
        raise not_found(f"no run {run_id[:128]!r}", "see /api/v1/runs", "run")
    return row


def list_runs(connection: sa.Connection, q: str, status: str, limit: int, offset: int) -> Runs:
    """Return a page of runs, newest first; `q` looks into id, name, command and hosts."""
    table = tables.run.c
    where: list[sa.ColumnElement[bool]] = []
    for word in q.split():
        ranks = tables.rank.c
        on_host = sa.select(ranks.run_id).where(ranks.host.icontains(word, autoescape=True))
        where.append(
            sa.or_(
                *(
                    column.icontains(word, autoescape=True)
                    for column in (table.run_id, table.name, table.command, table.tags)
                ),
                table.run_id.in_(on_host),
            )
        )
    wanted = [name for name in status.split(",") if name in _STATUSES]
    if wanted:
        where.append(table.status.in_(wanted))
    total = connection.scalar(sa.select(sa.func.count()).select_from(tables.run).where(*where))
    rows = connection.execute(
        sa.select(tables.run)
        .where(*where)
        .order_by(table.started_ns.desc(), table.run_id)
        .limit(min(max(limit, 1), MAX_LIMIT))
        .offset(max(offset, 0))
    ).all()
    hosts = hosts_of(connection, [row.run_id for row in rows])
    return Runs(
        total=int(total or 0), runs=[summary(row, hosts.get(row.run_id, {})) for row in rows]
    )


def hosts_of(connection: sa.Connection, run_ids: list[str]) -> dict[str, dict[str, int | None]]:
    """Return for each run its hosts with their node rank, those of its newest attempt."""
    ranks, runs = tables.rank.c, tables.run.c
    rows = connection.execute(
        sa.select(ranks.run_id, ranks.host, sa.func.min(ranks.node_rank).label("node"))
        .join(tables.run, (runs.run_id == ranks.run_id) & (runs.attempt == ranks.attempt))
        .where(ranks.run_id.in_(run_ids), ranks.host != "")
        .group_by(ranks.run_id, ranks.host)
        .order_by("node", ranks.host)
    )
    found: dict[str, dict[str, int | None]] = {}
    for run_id, host, node in rows:
        found.setdefault(run_id, {})[host] = node
    return found


def summary(row: sa.Row[Any], hosts: dict[str, int | None]) -> RunSummary:
    """Return the summary of a run."""
    nodes = {node for node in hosts.values() if node is not None and node >= 0}
    return RunSummary(
        run_id=row.run_id,
        name=row.name or row.run_id,
        status=row.status if row.status in _STATUSES else "running",
        status_text=row.status_text or row.status,
        started_ms=to_ms(row.started_ns),
        ended_ms=to_ms(row.ended_ns),
        last_seen_ms=to_ms(row.last_seen_ns),
        world_size=row.world_size or None,
        # Several "hosts" of a test may share a node, and a node may show under two names.
        num_nodes=max(len(nodes), 1) if hosts else None,
        hosts=list(hosts),
        attempt=row.attempt,
        step=row.step,
        command=json.loads(row.command),
        launcher=row.launcher,
        tags=json.loads(row.tags),
        verdict=_short_verdict(json_object(row.verdict)),
    )


def _short_verdict(verdict: dict[str, Any] | None) -> ShortVerdict | None:
    if verdict is None:
        return None
    return ShortVerdict(
        kind=str(verdict.get("kind", "")),
        severity=str(verdict.get("severity", "")),
        what=str(verdict.get("what", "")),
        cost_throughput_ratio=verdict.get("cost_throughput_ratio"),
    )
