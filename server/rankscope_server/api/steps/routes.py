"""Steps, ranks, collectives, errors and series of a run."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from rankscope_server.api.machines import queries as machine_views
from rankscope_server.api.machines import samples as sample_views
from rankscope_server.api.machines.schema import Machines
from rankscope_server.api.ranks import collectives as collective_views
from rankscope_server.api.ranks import errors as error_views
from rankscope_server.api.ranks import queries as rank_views
from rankscope_server.api.ranks.schema import (
    CollectiveRecords,
    Collectives,
    Errors,
    RankDetail,
    Ranks,
)
from rankscope_server.api.replies import documented, send
from rankscope_server.api.runs.findings import onset_step
from rankscope_server.api.runs.queries import run_row
from rankscope_server.api.service import service_of
from rankscope_server.api.steps import budget as budget_views
from rankscope_server.api.steps import map as map_views
from rankscope_server.api.steps import queries as step_views
from rankscope_server.api.steps import series as series_views
from rankscope_server.api.steps.schema import Budget, Cell, Map, MetricsAnswer, Samples, Throughput

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["data"])
MAX_STEP = 1 << 48
Step = Annotated[int | None, Query(ge=0, le=MAX_STEP)]
From = Annotated[int | None, Query(alias="from", ge=0, le=MAX_STEP)]
To = Annotated[int | None, Query(alias="to", ge=0, le=MAX_STEP)]
Milliseconds = Annotated[float | None, Query(ge=0, le=4e12, allow_inf_nan=False)]
Rank = Annotated[int | None, Query(ge=0, le=1 << 20)]
Attempt = Annotated[int | None, Query(ge=0, le=1 << 20)]
Width = Annotated[int, Query(ge=1, le=step_views.MAX_COLUMNS)]


@router.get("/map", **documented(Map))
def rank_map(
    request: Request,
    run: str,
    metric: str = "own_work",
    lo: From = None,
    hi: To = None,
    width: Width = 600,
    lanes: Annotated[int, Query(ge=1, le=map_views.MAX_LANES)] = 256,
) -> Response:
    """Return the map, ranks by steps."""
    with service_of(request).read() as connection:
        body = map_views.rank_map(
            connection, run_row(connection, run), metric, lo, hi, width, lanes
        )
    return send(request, body, body.rows)


@router.get("/cell", **documented(Cell))
def cell(
    request: Request,
    run: str,
    rank: Annotated[int, Query(ge=0, le=1 << 20)],
    step: Annotated[int, Query(ge=1, le=MAX_STEP)],
) -> Response:
    """Return the exact numbers of one rank in one step."""
    with service_of(request).read() as connection:
        body = map_views.cell(connection, run_row(connection, run), rank, step)
    return send(request, body, [body])


@router.get("/throughput", **documented(Throughput))
def throughput(
    request: Request, run: str, lo: From = None, hi: To = None, width: Width = 600
) -> Response:
    """Return step times per bin of steps."""
    with service_of(request).read() as connection:
        row = run_row(connection, run)
        first, last = map_views.step_range(row, lo, hi)
        body = step_views.throughput(connection, run, first, last, width, onset_step(row), row.step)
    return send(request, body, [body])


@router.get("/budget", **documented(Budget))
def budget(
    request: Request,
    run: str,
    last: Annotated[int, Query(ge=1, le=budget_views.MAX_STEPS)] = step_views.RECENT_STEPS,
) -> Response:
    """Return where a step goes."""
    with service_of(request).read() as connection:
        body = budget_views.budget(connection, run_row(connection, run), last)
    return send(request, body, body.rows)


@router.get("/ranks", **documented(Ranks))
def ranks(request: Request, run: str, attempt: Attempt = None) -> Response:
    """List the ranks of an attempt."""
    service = service_of(request)
    with service.read() as connection:
        body = rank_views.ranks(
            connection, run_row(connection, run), attempt, time.time_ns(),
            service.settings.silent_after_seconds,
        )  # fmt: skip
    return send(request, body, body.ranks)


@router.get("/ranks/{rank}", **documented(RankDetail))
def rank(request: Request, run: str, rank: Annotated[int, Path(ge=0, le=1 << 20)]) -> Response:
    """Return one rank in full."""
    service = service_of(request)
    with service.read() as connection:
        body = rank_views.rank(
            connection, run_row(connection, run), rank, time.time_ns(),
            service.settings.silent_after_seconds,
        )  # fmt: skip
    return send(request, body, [body])


@router.get("/collectives", **documented(Collectives))
def collectives(
    request: Request, run: str, lo: From = None, hi: To = None, rank: Rank = None
) -> Response:
    """Return what was communicated."""
    with service_of(request).read() as connection:
        body = collective_views.collectives(connection, run_row(connection, run), rank, lo, hi)
    return send(request, body, body.rows)


@router.get("/collectives/records", **documented(CollectiveRecords))
def collective_records(
    request: Request,
    run: str,
    rank: Rank = None,
    lo: From = None,
    hi: To = None,
    limit: Annotated[int, Query(ge=1, le=collective_views.MAX_RECORDS)] = 500,
) -> Response:
    """Return raw records, newest first."""
    with service_of(request).read() as connection:
        body = collective_views.records(connection, run_row(connection, run), rank, lo, hi, limit)
    return send(request, body, body.rows)


@router.get("/errors", **documented(Errors))
def errors(request: Request, run: str) -> Response:
    """List error groups, the first one first."""
    with service_of(request).read() as connection:
        run_row(connection, run)
        body = error_views.errors(connection, run)
    return send(request, body, body.groups)


@router.get("/machines", **documented(Machines))
def machines(request: Request, run: str) -> Response:
    """Return the machines of a run: what is sampled there, and what happened to them."""
    with service_of(request).read() as connection:
        body = machine_views.machines(connection, run_row(connection, run))
    return send(request, body, body.machines)


@router.get("/samples", **documented(Samples))
def samples(
    request: Request,
    run: str,
    kind: str = "host",
    host: str = "",
    names: str = "",
    from_ms: Milliseconds = None,
    to_ms: Milliseconds = None,
    width: Width = 600,
) -> Response:
    """Return samples of one kind over time."""
    with service_of(request).read() as connection:
        run_row(connection, run)
        body = sample_views.samples(
            connection, run, kind, _items(host), _items(names), from_ms, to_ms, width
        )
    return send(request, body, body.series)


@router.get("/metrics", **documented(MetricsAnswer))
def metrics(
    request: Request,
    run: str,
    names: str = "",
    width: Width = 600,
    rank: Annotated[int | None, Query(ge=0, le=MAX_STEP)] = None,
    merged: bool = False,
) -> Response:
    """Return the numbers of training: of each rank, of one, or merged over all ranks."""
    with service_of(request).read() as connection:
        run_row(connection, run)
        body = series_views.metrics(connection, run, _items(names), width, rank=rank, merged=merged)
    return send(request, body, body.series)


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]
