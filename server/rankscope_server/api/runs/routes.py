"""Runs and their first page."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from msgspec import structs

from rankscope_server.api.access.rules import sender
from rankscope_server.api.replies import documented, send
from rankscope_server.api.runs import environment as environment_queries
from rankscope_server.api.runs.old_answers import as_of_now
from rankscope_server.api.runs.queries import MAX_LIMIT, list_runs, reading
from rankscope_server.api.runs.schema import EnvironmentAnswer, Runs
from rankscope_server.api.service import service_of

router = APIRouter(prefix="/api/v1", tags=["runs"])
Attempt = Annotated[int | None, Query(ge=0, le=1 << 20)]


@router.get("/runs", **documented(Runs))
def runs(
    request: Request,
    q: str = "",
    status: str = "",
    limit: Annotated[int, Query(ge=1, le=MAX_LIMIT)] = 50,
    offset: Annotated[int, Query(ge=0, le=1 << 40)] = 0,
) -> Response:
    """List runs, newest first."""
    service = service_of(request)
    with service.read() as connection:
        body = list_runs(connection, sender(request).only_project, q, status, limit, offset)
    listed = [
        structs.replace(
            run, answer=as_of_now(run.answer, run.status, service.behind_seconds(run.run_id))
        )
        for run in body.runs
    ]
    return send(request, structs.replace(body, runs=listed), listed)


@router.get("/runs/{run}/environment", **documented(EnvironmentAnswer))
def environment(request: Request, run: str, attempt: Attempt = None) -> Response:
    """Return what differs between the environments of the ranks."""
    with reading(request, run) as (connection, row):
        number = row.attempt if attempt is None else attempt
        body = environment_queries.environment(connection, run, number, row.world_size)
    return send(request, body, body.differences)
