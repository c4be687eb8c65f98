"""Steps, ranks, collectives, errors and series of a run."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from rankscope.wire.schema import MAX_RANK
from rankscope_server.api.parameters import (
    MAX_STEP,
    From,
    To,
    Width,
    items,
    one_of,
    rank_ranges,
)
from rankscope_server.api.replies import documented, send
from rankscope_server.api.runs.queries import onset_step, reading, run_row
from rankscope_server.api.service import service_of
from rankscope_server.api.steps import beside as beside_queries
from rankscope_server.api.steps import budget as budget_queries
from rankscope_server.api.steps import each as each_queries
from rankscope_server.api.steps import map as map_queries
from rankscope_server.api.steps import queries as step_queries
from rankscope_server.api.steps import series as series_queries
from rankscope_server.api.steps.lanes import MAX_LANES, ORDERS
from rankscope_server.api.steps.schema import (
    BesidePeers,
    Budget,
    Cell,
    Map,
    MetricsAnswer,
    Steps,
    Throughput,
)

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["data"])
Step = Annotated[int | None, Query(ge=0, le=MAX_STEP)]


@router.get("/map", **documented(Map))
def rank_map(
    request: Request,
    run: str,
    metric: Annotated[str, one_of(map_queries.MAP_METRICS)] = "own_work",
    lo: From = None,
    hi: To = None,
    width: Width = 600,
    lanes: Annotated[int, Query(ge=1, le=MAX_LANES)] = 256,
    order: Annotated[str, one_of(ORDERS)] = "rank",
) -> Response:
    """Return the map, ranks by steps."""
    with service_of(request).read() as connection:
        body = map_queries.rank_map(
            connection, run_row(connection, run), metric, lo, hi, width, lanes, order
        )
    return send(request, body, body.rows)


@router.get("/cell", **documented(Cell))
def cell(
    request: Request,
    run: str,
    rank: Annotated[int, Query(ge=0, le=MAX_RANK)],
    step: Annotated[int, Query(ge=1, le=MAX_STEP)],
) -> Response:
    """Return the exact numbers of one rank in one step."""
    with reading(request, run) as (connection, row):
        body = map_queries.cell(connection, row, rank, step)
    return send(request, body, [body])


@router.get("/cell/worst", **documented(Cell))
def worst_cell(
    request: Request,
    run: str,
    ranks: str,
    lo: Annotated[int, Query(alias="from", ge=1, le=MAX_STEP)],
    hi: Annotated[int, Query(alias="to", ge=1, le=MAX_STEP)],
    metric: Annotated[str, one_of(map_queries.MAP_METRICS)] = "own_work",
) -> Response:
    """Return which rank and step a bin of the map has its colour from, and its exact numbers."""
    with reading(request, run) as (connection, row):
        body = map_queries.worst_cell(connection, row, metric, rank_ranges(ranks), lo, hi)
    return send(request, body, [body])


@router.get("/ranks/{rank}/steps", **documented(BesidePeers))
def beside_peers(
    request: Request,
    run: str,
    rank: Annotated[int, Path(ge=0, le=MAX_RANK)],
    metric: Annotated[str, one_of(map_queries.MAP_METRICS)] = "own_work",
    lo: From = None,
    hi: To = None,
    width: Width = 600,
) -> Response:
    """Return the steps of one rank beside those of its peers."""
    with reading(request, run) as (connection, row):
        body = beside_queries.beside_peers(connection, row, rank, metric, lo, hi, width)
    return send(request, body, [body])


@router.get("/steps", **documented(Steps))
def steps(request: Request, run: str, lo: From = None, hi: To = None) -> Response:
    """Return each step of the job in a few numbers."""
    with reading(request, run) as (connection, row):
        body = each_queries.steps(connection, row, lo, hi)
    return send(request, body, body.steps)


@router.get("/throughput", **documented(Throughput))
def throughput(
    request: Request, run: str, lo: From = None, hi: To = None, width: Width = 600
) -> Response:
    """Return step times per bin of steps."""
    with reading(request, run) as (connection, row):
        first, last = map_queries.step_range(row, lo, hi)
        body = step_queries.throughput(
            connection, run, first, last, width, onset_step(row), row.step
        )
    return send(request, body, [body])


@router.get("/budget", **documented(Budget))
def budget(
    request: Request,
    run: str,
    last: Annotated[int, Query(ge=1, le=budget_queries.MAX_STEPS)] = step_queries.RECENT_STEPS,
) -> Response:
    """Return what a step consists of."""
    with reading(request, run) as (connection, row):
        body = budget_queries.budget(connection, row, last)
    return send(request, body, body.rows)


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
    with reading(request, run) as (connection, _):
        body = series_queries.metrics(
            connection, run, items(names), width, rank=rank, merged=merged
        )
    return send(request, body, body.series)
