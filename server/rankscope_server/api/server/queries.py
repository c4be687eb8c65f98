"""What the server says of itself, from its parts, its counters and rows of live runs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa

import rankscope
from rankscope.wire import thinning
from rankscope.wire.schema import IMPORTED, THINNING_CHANGED, Event
from rankscope_server.analysis.loop import BEHIND_SECONDS
from rankscope_server.answers import capped, json_object, of_row
from rankscope_server.api.operations import readiness
from rankscope_server.api.operations.schema import ReadyPart
from rankscope_server.api.runs.queries import losses, missing_batches, silent_rank, status_of
from rankscope_server.api.server.schema import OwnFigure, SeenRun, ServerAnswer
from rankscope_server.api.service import Service
from rankscope_server.observe.thinning import Thinning, thinning_of
from rankscope_server.store import tables
from rankscope_server.text import plural

MAX_RUNS = 50
_DAY_NS = 86_400 * 10**9
_OVER = ("ended", "failed")


def server(service: Service) -> ServerAnswer:
    """Return how every part is, what is seen of live runs, and all own numbers."""
    parts = readiness.parts_of(service)
    with service.read() as connection:
        runs, total = _live(connection, service)
    problems = list(_problems(service, parts, runs))
    return ServerAnswer(
        text="; ".join(problems) or _well(total),
        version=rankscope.__version__,
        is_well=not problems,
        parts=parts,
        runs=runs,
        runs_capped=capped(len(runs), total),
        figures=[of_row(OwnFigure, one) for one in service.counters.figures()],
    )


def _problems(
    service: Service, parts: Sequence[ReadyPart], runs: Sequence[SeenRun]
) -> Iterator[str]:
    """Yield what is not well, the worst first."""
    for part in parts:
        if not part.ready:
            yield f"{part.part} is not ready: {part.reason}"
    behind = max(service.analysis.behind_seconds, service.intake.delay_seconds())
    if behind > BEHIND_SECONDS:
        yield f"The server is behind by {behind:.0f} s"
    level = service.analysis.shedding.highest
    if level:
        yield f"Ranks are asked to record less: {thinning.words(level)}"
    given_up = int(service.alerts.num_messages("given_up"))
    if given_up:
        yield f"{plural(given_up, 'alert message')} could not be sent"
    for count, words in (
        (sum(run.lost > 0 or run.missing_batches > 0 for run in runs), "lost records"),
        (sum(run.silent > 0 for run in runs), "silent ranks"),
    ):
        if count:
            verb = "has" if count == 1 else "have"
            yield f"{count} of {plural(len(runs), 'live run')} {verb} {words}"


def _well(num_live: int) -> str:
    """Return the sentence of a server that is well."""
    if not num_live:
        return "Every part works; no run is live"
    return f"Every part works, and nothing is lost of {plural(num_live, 'live run')}"


def _live(connection: sa.Connection, service: Service) -> tuple[list[SeenRun], int]:
    """Return the newest live runs, and how many there are."""
    table, now_ns = tables.run.c, time.time_ns()
    where = (
        table.status.not_in(_OVER), table.launcher != IMPORTED,
        table.received_ns >= now_ns - _DAY_NS,
    )  # fmt: skip
    total = connection.scalar(sa.select(sa.func.count()).select_from(tables.run).where(*where))
    rows = connection.execute(
        sa.select(tables.run).where(*where)
        .order_by(table.started_ns.desc(), table.run_id).limit(MAX_RUNS)
    ).all()  # fmt: skip
    return [_seen(connection, service, row) for row in rows], int(total or 0)


def _seen(connection: sa.Connection, service: Service, run: sa.Row[Any]) -> SeenRun:
    ranks = tables.rank.c
    is_silent = silent_rank(service.silent_before_ns(run.run_id))
    known, silent = connection.execute(
        sa.select(sa.func.count(), sa.func.sum(sa.case((is_silent, 1), else_=0)))
        .where(ranks.run_id == run.run_id, ranks.attempt == run.attempt)
    ).one()  # fmt: skip
    worst = _thinned(connection, run)
    return of_row(
        SeenRun, run, name=run.name or run.run_id, status=status_of(run.status),
        expected=max(run.world_size, known), reporting=known - int(silent or 0),
        silent=int(silent or 0), lost=losses(connection, run.run_id).count,
        missing_batches=missing_batches(connection, run.run_id),
        thinning=thinning.words(worst.level) if worst else "",
        overhead_ratio=worst.overhead_ratio if worst else None,
        budget_ratio=worst.budget_ratio if worst else None,
    )  # fmt: skip


def _thinned(connection: sa.Connection, run: sa.Row[Any]) -> Thinning | None:
    """Return the coarsest level that holds on a rank of the newest attempt."""
    table = tables.event
    newest = (
        sa.select(sa.func.max(table.c.id))
        .where(
            table.c.run_id == run.run_id, table.c.attempt == run.attempt,
            table.c.name == THINNING_CHANGED,
        )
        .group_by(table.c.rank)
    )  # fmt: skip
    rows = connection.execute(sa.select(table).where(table.c.id.in_(newest)))
    found = (
        thinning_of(
            Event(
                attempt=row.attempt, rank=row.rank, time_ns=row.time_ns, step=row.step,
                name=row.name, fields=json_object(row.fields),
            )
        )
        for row in rows
    )  # fmt: skip
    levels = [one for one in found if one is not None and one.level > 0]
    return max(levels, key=lambda one: (one.level, one.overhead_ratio), default=None)
