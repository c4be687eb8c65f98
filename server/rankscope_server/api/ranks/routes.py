"""Ranks, collectives and errors of a run."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from rankscope.wire.schema import MAX_RANK
from rankscope_server.api.parameters import Attempt, From, Rank, To
from rankscope_server.api.ranks import collectives as collective_queries
from rankscope_server.api.ranks import errors as error_queries
from rankscope_server.api.ranks import queries as rank_queries
from rankscope_server.api.ranks import records as record_queries
from rankscope_server.api.ranks.chunks import Wanted
from rankscope_server.api.ranks.schema import (
    CollectiveRecords,
    Collectives,
    Errors,
    RankDetail,
    Ranks,
)
from rankscope_server.api.replies import documented, send
from rankscope_server.api.runs.queries import reading
from rankscope_server.api.service import service_of

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["data"])


@router.get("/ranks", **documented(Ranks))
def ranks(request: Request, run: str, attempt: Attempt = None) -> Response:
    """List the ranks of an attempt."""
    with reading(request, run) as (connection, row):
        silent_before_ns = service_of(request).silent_before_ns(run)
        body = rank_queries.ranks(connection, row, attempt, silent_before_ns)
    return send(request, body, body.ranks)


@router.get("/ranks/{rank}", **documented(RankDetail))
def rank(request: Request, run: str, rank: Annotated[int, Path(ge=0, le=MAX_RANK)]) -> Response:
    """Return one rank in full."""
    with reading(request, run) as (connection, row):
        body = rank_queries.rank(connection, row, rank, service_of(request).silent_before_ns(run))
    return send(request, body, [body])


@router.get("/collectives", **documented(Collectives))
def collectives(
    request: Request,
    run: str,
    lo: From = None,
    hi: To = None,
    rank: Rank = None,
    attempt: Attempt = None,
) -> Response:
    """Return what was communicated."""
    wanted = Wanted(run, attempt, rank, lo, hi)
    with reading(request, run) as (connection, row):
        body = collective_queries.collectives(connection, row, wanted)
    return send(request, body, body.rows)


@router.get("/collectives/records", **documented(CollectiveRecords))
def collective_records(
    request: Request,
    run: str,
    rank: Rank = None,
    lo: From = None,
    hi: To = None,
    attempt: Attempt = None,
    limit: Annotated[int, Query(ge=1, le=record_queries.MAX_RECORDS)] = 500,
) -> Response:
    """Return raw records, newest first."""
    wanted = Wanted(run, attempt, rank, lo, hi)
    with reading(request, run) as (connection, row):
        body = record_queries.records(connection, row, wanted, limit)
    return send(request, body, body.rows)


@router.get("/errors", **documented(Errors))
def errors(request: Request, run: str) -> Response:
    """List error groups, the first one first."""
    with reading(request, run) as (connection, _):
        body = error_queries.errors(connection, run)
    return send(request, body, body.groups)
