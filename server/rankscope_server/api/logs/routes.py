"""Log lines of a run, and the search over all runs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from rankscope_server.api.access.rules import sender
from rankscope_server.api.logs import queries as log_queries
from rankscope_server.api.logs.schema import Logs, SearchAnswer
from rankscope_server.api.replies import documented, send
from rankscope_server.api.runs.queries import reading
from rankscope_server.api.service import service_of
from rankscope_server.problems import Problem

router = APIRouter(prefix="/api/v1", tags=["logs"])
Milliseconds = Annotated[float | None, Query(ge=0, le=4e12, allow_inf_nan=False)]
Limit = Annotated[int, Query(ge=1, le=log_queries.MAX_LIMIT)]


@router.get("/runs/{run}/logs", **documented(Logs))
def logs(
    request: Request,
    run: str,
    q: str = "",
    rank: str = "",
    host: str = "",
    level: str = "",
    min_level: str = "",
    stream: str = "",
    logger: str = "",
    from_ms: Milliseconds = None,
    to_ms: Milliseconds = None,
    after: Annotated[int | None, Query(ge=0, lt=1 << 62)] = None,
    limit: Limit = 500,
    cursor: str | None = None,
    fold: bool = True,
) -> Response:
    """Return a page of lines, newest first; with `after` only newer ones, oldest first."""
    query = log_queries.parse_query(
        q, rank, host, level, min_level, stream, logger, from_ms, to_ms, after
    )
    with reading(request, run) as (connection, _):
        body = log_queries.logs(connection, run, query, limit, cursor, fold)
    return send(request, body, body.lines)


@router.get("/search", **documented(SearchAnswer))
def search(request: Request, q: str = "", limit: Limit = 100) -> Response:
    """Search the lines of all runs that the sender may see, newest first."""
    if not q.strip():
        raise Problem(422, "nothing to search for", "q", "give at least one word")
    with service_of(request).read() as connection:
        body = log_queries.search(connection, sender(request).only_project, q, limit)
    return send(request, body, body.lines)
