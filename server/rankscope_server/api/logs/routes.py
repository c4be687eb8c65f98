"""Log lines of a run, those around a line, and the search over all runs."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import APIRouter, Path, Query, Request, Response

from rankscope_server.api.access.rules import sender
from rankscope_server.api.logs import queries as log_queries
from rankscope_server.api.logs.schema import LogContext, Logs, SearchAnswer
from rankscope_server.api.parameters import Milliseconds
from rankscope_server.api.replies import documented, send
from rankscope_server.api.runs.queries import reading
from rankscope_server.api.service import service_of

router = APIRouter(prefix="/api/v1", tags=["logs"])
Limit = Annotated[int, Query(ge=1, le=log_queries.MAX_LIMIT)]
LineId = Annotated[int, Path(ge=0, lt=1 << 62)]
After = Annotated[int | None, Query(ge=0, lt=1 << 62)]
NumLines = Annotated[int, Query(ge=0, le=log_queries.MAX_CONTEXT)]
_ENDED = ("ended", "failed")


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
    after: After = None,
    limit: Limit = 500,
    cursor: str | None = None,
    fold: bool = True,
) -> Response:
    """Return a page of lines, newest first; with `after` only newer ones, oldest first."""
    filters = log_queries.parse_filters(rank, host, level, min_level, stream, logger)
    with reading(request, run) as (connection, row):
        node = log_queries.parse_box(q, _now_ns(row))
        query = log_queries.log_query(node, filters, from_ms, to_ms)
        if after is not None:
            body = log_queries.tail(connection, run, query, after, limit)
        else:
            body = log_queries.logs(connection, run, query, limit, cursor, fold)
            if not body.lines and not cursor:
                body = log_queries.with_suggestion(connection, run, q, query, body)
    return send(request, body, body.lines)


@router.get("/runs/{run}/logs/{id}/context", **documented(LogContext))
def context(
    request: Request, run: str, id: LineId, lines: NumLines = 20, everyone: bool = False
) -> Response:
    """Return a line and so many before and after it, of its rank, or of all at that time."""
    with reading(request, run) as (connection, _):
        body = log_queries.context(connection, run, id, lines, everyone)
    return send(request, body, body.lines)


@router.get("/search", **documented(SearchAnswer))
def search(
    request: Request,
    q: str = "",
    run: str = "",
    project: str = "",
    rank: str = "",
    host: str = "",
    level: str = "",
    min_level: str = "",
    stream: str = "",
    logger: str = "",
    from_ms: Milliseconds = None,
    to_ms: Milliseconds = None,
    after: After = None,
    limit: Limit = 100,
    cursor: str | None = None,
    fold: bool = True,
) -> Response:
    """Search the lines of all runs that the sender may see; as the lines of one run."""
    filters = log_queries.parse_filters(rank, host, level, min_level, stream, logger, run, project)
    with service_of(request).read() as connection:
        node, seen = log_queries.parse_box(q, time.time_ns()), sender(request).only_project
        query = replace(log_queries.log_query(node, filters, from_ms, to_ms), project=seen)
        if after is not None:
            body = log_queries.search_tail(connection, query, after, limit)
        else:
            body = log_queries.search(connection, query, limit, cursor, fold)
    return send(request, body, body.lines)


def _now_ns(run: sa.Row[Any]) -> int:
    """Return from when on `since:-10m` counts: of a run that has ended, from its end."""
    return int(run.last_seen_ns) if run.status in _ENDED else time.time_ns()
