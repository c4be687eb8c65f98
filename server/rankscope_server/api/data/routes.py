"""What is stored of a run, page by page."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request, Response

from rankscope.wire.schema import CHUNK_COLUMNS
from rankscope.wire.stored import MAX_ROWS, ROW_COLUMNS, RowPage
from rankscope_server.api.data import queries
from rankscope_server.api.parameters import Attempt, From, To, one_of, rank_ranges
from rankscope_server.api.replies import documented, documented_as, send
from rankscope_server.api.runs.queries import reading

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["data"])
MEDIA_TYPE = "application/msgpack"
_encode = msgspec.msgpack.Encoder().encode


@router.get("/chunks", **documented_as(MEDIA_TYPE, "Chunks of one kind, as agents sent them."))
def chunks(
    request: Request,
    run: str,
    kind: Annotated[str, one_of(CHUNK_COLUMNS)],
    after: Annotated[int | None, Query(ge=0, le=(1 << 63) - 1)] = None,
    ranks: str = "",
    lo: From = None,
    hi: To = None,
    attempt: Attempt = None,
) -> Response:
    """Return a page of chunks that hold events of these ranks and steps, and maybe others."""
    wanted = queries.Wanted(kind, attempt, rank_ranges(ranks) if ranks else (), lo, hi)
    with reading(request, run) as (connection, _):
        page = queries.chunk_page(connection, run, wanted, after)
    return Response(_encode(page), media_type=MEDIA_TYPE)


@router.get("/rows", **documented(RowPage))
def rows(
    request: Request,
    run: str,
    kind: Annotated[str, one_of(ROW_COLUMNS)],
    after: Annotated[str, Query(max_length=2_000)] = "",
    limit: Annotated[int, Query(ge=1, le=MAX_ROWS)] = MAX_ROWS,
) -> Response:
    """Return a page of the rows of one kind."""
    with reading(request, run) as (connection, _):
        page = queries.row_page(connection, run, kind, after, limit)
    return send(request, page)
