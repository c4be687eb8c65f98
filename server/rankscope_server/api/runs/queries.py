"""The list of runs and the summary of one."""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import sqlalchemy as sa
from fastapi import Request

from rankscope.wire.schema import IMPORTED
from rankscope_server.answers import json_object, of_row
from rankscope_server.api.runs.schema import (
    LossRow,
    Runs,
    RunStatus,
    RunSummary,
    ShortAnswer,
    ShortVerdict,
)
from rankscope_server.api.service import service_of
from rankscope_server.observe.stage_table import SERVER
from rankscope_server.prices import PriceList, Rate
from rankscope_server.store import tables
from rankscope_server.store.chunks import counting
from rankscope_server.store.deletion import absent
from rankscope_server.store.projects import of_project

MAX_LIMIT = 500
NOT_LOOKED_AT = "No verdict yet: the first look is due"
_STATUSES: tuple[RunStatus, ...] = get_args(RunStatus)


def run_row(connection: sa.Connection, run_id: str) -> sa.Row[Any]:
    """Return the row of a run. Raises Problem 404, 410 where it was deleted."""
    row = None
    if "\x00" not in run_id:  # which some databases do not take even to compare
        found = sa.select(tables.run).where(tables.run.c.run_id == run_id)
        row = connection.execute(found).first()
    if row is None:
        raise absent(connection, run_id)
    return row


@contextmanager
def reading(request: Request, run_id: str) -> Iterator[tuple[sa.Connection, sa.Row[Any]]]:
    """Give a connection that sees one state of the store, and the run. Raises Problem 404."""
    with service_of(request).read() as connection:
        request.state.unread = counting(connection)
        yield connection, run_row(connection, run_id)


def list_runs(
    connection: sa.Connection, project: str | None, q: str, status: str, limit: int, offset: int
) -> Runs:
    """Return a page of runs of a project, newest first; `q` looks into id, name, command, hosts."""
    table = tables.run.c
    where = of_project(tables.run, project)
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


def run_before(connection: sa.Connection, run: sa.Row[Any]) -> sa.Row[Any] | None:
    """Return the newest run of the same project and name that began before this one."""
    table = tables.run.c
    same = (table.name == run.name, table.project == run.project, table.run_id != run.run_id)
    return connection.execute(
        sa.select(tables.run)
        .where(*same, table.started_ns < run.started_ns)
        .order_by(table.started_ns.desc(), table.run_id)
        .limit(1)
    ).first()


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


def status_of(stored: str) -> RunStatus:
    """Return the status of a run; a word that this version does not know is of one that runs."""
    return next((known for known in _STATUSES if known == stored), "running")


def summary(row: sa.Row[Any], hosts: dict[str, int | None]) -> RunSummary:
    """Return the summary of a run."""
    nodes = {node for node in hosts.values() if node is not None and node >= 0}
    return of_row(
        RunSummary,
        row,
        name=row.name or row.run_id,
        status=status_of(row.status),
        status_text=row.status_text or row.status,
        world_size=row.world_size or None,
        # Several "hosts" of a test may share a node, and a node may show under two names.
        num_nodes=max(len(nodes), 1) if hosts else None,
        hosts=list(hosts),
        command=json.loads(row.command),
        tags=json.loads(row.tags),
        verdict=short_verdict(json_object(row.verdict)),
        answer=short_answer(json_object(row.answer)),
    )


def short_answer(answer: dict[str, Any] | None) -> ShortAnswer:
    """Return the first sentence about a run, whether the analysis looked at it or not yet."""
    if answer is None:
        return ShortAnswer(state="waiting", text=NOT_LOOKED_AT)
    return ShortAnswer(state=answer["state"], text=str(answer["text"]))


def short_verdict(verdict: dict[str, Any] | None) -> ShortVerdict | None:
    """Return what lists show of a verdict."""
    if verdict is None:
        return None
    return ShortVerdict(
        kind=str(verdict.get("kind", "")),
        severity=str(verdict.get("severity", "")),
        what=str(verdict.get("what", "")),
        cost_throughput_ratio=verdict.get("cost_throughput_ratio"),
    )


MAX_LOSSES = 200


# What each rank is and how it ended: a third of its row, without what it was doing.
RANK_HEAD = (
    "attempt", "rank", "host", "role", "stage", "backend", "step", "registered_ns",
    "last_seen_ns", "received_ns", "ended_ns", "end_reason", "end_detail", "exit_code",
    "exit_signal",
)  # fmt: skip


def rate_of(connection: sa.Connection, run: sa.Row[Any], prices: PriceList) -> Rate | None:
    """Return what an hour of a rank of a run costs; None where a host of it has no price."""
    if not prices.rows:
        return None
    ranks = tables.rank.c
    hosts = connection.scalars(
        sa.select(ranks.host).where(ranks.run_id == run.run_id, ranks.attempt == run.attempt)
    )
    return prices.rate_of(list(hosts))


def rate_in(request: Request, connection: sa.Connection, run: sa.Row[Any]) -> Rate | None:
    """Return the same by the price list of this server."""
    return rate_of(connection, run, service_of(request).settings.price_list())


SERVERS = -2  # the role of all that serve others


def role_of(row: Any) -> int:
    """Return with which ranks one is compared: those of its pipeline stage, servers apart."""
    return SERVERS if row.role == SERVER else int(row.stage)


def rank_rows(
    connection: sa.Connection,
    run_id: str,
    attempt: int,
    columns: tuple[str, ...] = tuple(tables.rank.c.keys()),
) -> list[Any]:
    """Return `columns` of the ranks of an attempt as attributes, in the order of the ranks."""
    table = tables.rank.c
    rows = connection.execute(
        sa.select(*(table[name] for name in columns))
        .where(table.run_id == run_id, table.attempt == attempt)
        .order_by(table.rank)
    )
    return list(map(_named(columns)._make, rows))


@cache
def _named(columns: tuple[str, ...]) -> Any:
    """Return a tuple whose attributes take a tenth of the time that those of a row take."""
    return namedtuple("RankColumns", columns)


def silent_rank(silent_before_ns: int | sa.ColumnElement[int]) -> sa.ColumnElement[bool]:
    """Return whether a rank of a live run has not ended and sends nothing."""
    ranks = tables.rank.c
    return sa.and_(
        ranks.ended_ns.is_(None), sa.func.coalesce(ranks.received_ns, 0) < silent_before_ns
    )


def is_silent(row: sa.Row[Any], run: sa.Row[Any], silent_before_ns: int) -> bool:
    """Return whether nothing came of a rank that has not ended for too long; not in a recording."""
    if row.ended_ns is not None or run.launcher == IMPORTED:
        return False
    return bool((row.received_ns or 0) < silent_before_ns)


@dataclass(frozen=True, slots=True)
class Losses:
    """What the agents of a run lost, by reason, the most first; where they are many, not all."""

    rows: list[LossRow]
    num_reasons: int
    count: int  # of all reasons


def losses(connection: sa.Connection, run_id: str) -> Losses:
    """Return what the agents of a run lost."""
    table = tables.loss.c
    total = sa.func.sum(table.count)
    by_reason = (
        sa.select(table.host, table.rank, table.source, table.reason, total.label("total"))
        .where(table.run_id == run_id)
        .group_by(table.host, table.rank, table.source, table.reason)
        .having(total > 0)
    )
    lost = by_reason.subquery()
    number, count = connection.execute(sa.select(sa.func.count(), sa.func.sum(lost.c.total))).one()
    names = ("host", "rank", "source", "reason")
    rows = connection.execute(
        by_reason.order_by(total.desc(), *(table[name] for name in names)).limit(MAX_LOSSES)
    )
    return Losses(
        rows=[of_row(LossRow, row, count=int(row.total)) for row in rows],
        num_reasons=int(number),
        count=int(count or 0),
    )


# batches of some producers that did not arrive, though later ones did
NUM_MISSING = sa.func.sum(
    tables.producer.c.last_sequence - tables.producer.c.first_sequence + 1
    - tables.producer.c.received
)  # fmt: skip


def missing_batches(connection: sa.Connection, run_id: str) -> int:
    """Return how many batches of a run did not arrive, though later ones did."""
    question = sa.select(NUM_MISSING).where(tables.producer.c.run_id == run_id)
    return int(connection.scalar(question) or 0)


def onset_step(run: sa.Row[Any]) -> int | None:
    """Return the step since which the verdict holds."""
    body = json_object(run.verdict)
    return None if body is None else body.get("onset_step")
