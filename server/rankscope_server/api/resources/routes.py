"""Memory, utilisation and numbers of training over all ranks."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from rankscope_server.api.parameters import Milliseconds, items, ranks_of, to_ns
from rankscope_server.api.replies import documented, send
from rankscope_server.api.resources import queries
from rankscope_server.api.resources.schema import Resources, plain_rows
from rankscope_server.api.runs.queries import reading

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["data"])


@router.get("/resources", **documented(Resources))
def resources(
    request: Request,
    run: str,
    ranks: Annotated[str, Query(max_length=200)] = "",
    from_ms: Milliseconds = None,
    to_ms: Milliseconds = None,
    width: Annotated[int, Query(ge=1, le=600)] = 300,
) -> Response:
    """Return quantities of all ranks as bands, the worst as lines, on one grid of time."""
    chosen = ranks_of(items(ranks))
    with reading(request, run) as (connection, row):
        body = queries.resources(connection, row, chosen, (to_ns(from_ms), to_ns(to_ms)), width)
    return send(request, body, plain_rows(body.charts))
