"""What preflights found: the list, the matrix, the history of a node, a comparison."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from rankscope_server.api.access.rules import preflight_of, sender
from rankscope_server.api.preflight import matrix as matrices
from rankscope_server.api.preflight import queries
from rankscope_server.api.preflight.routes import Node, PreflightId
from rankscope_server.api.preflight.schema import (
    NodeHistory,
    PreflightComparison,
    PreflightMatrix,
    PreflightMetric,
    Preflights,
)
from rankscope_server.api.replies import documented, send
from rankscope_server.api.service import service_of
from rankscope_server.preflight.hub import reports_of

router = APIRouter(prefix="/api/v1/preflight", tags=["preflight"])
MAX_LIMIT = 500


@router.get("/runs", **documented(Preflights))
def listing(
    request: Request,
    run: Annotated[str, Query(pattern=r"^[A-Za-z0-9._-]{0,128}$")] = "",
    limit: Annotated[int, Query(ge=1, le=MAX_LIMIT)] = 50,
    offset: Annotated[int, Query(ge=0, le=1 << 40)] = 0,
) -> Response:
    """List preflights, newest first; with `run` those that precede this training run."""
    with service_of(request).read() as connection:
        body = queries.listing(connection, sender(request).only_project, run, limit, offset)
    return send(request, body, body.preflights)


@router.get("/runs/{id}/matrix", **documented(PreflightMatrix))
async def matrix(
    request: Request,
    id: PreflightId,
    metric: PreflightMetric = "connect",
    most: Annotated[int, Query(ge=2, le=matrices.MAX_NODES)] = matrices.MAX_NODES,
) -> Response:
    """Return nodes by nodes; of more than `most` those that findings name, and a sample."""
    live = await service_of(request).preflights.find(id)
    body = await run_in_threadpool(
        matrices.matrix, id, metric, live.expected, reports_of(live), live.verdict, most
    )
    return send(request, body, body.flags)


@router.get("/runs/{id}/compare", **documented(PreflightComparison))
async def compare(
    request: Request,
    id: PreflightId,
    before: Annotated[str, Query(pattern=r"^[A-Za-z0-9._-]{1,64}$")],
) -> Response:
    """Return what differs from the preflight `before`."""
    hub = service_of(request).preflights
    old, new = await preflight_of(request, before), await hub.find(id)
    body = await run_in_threadpool(queries.comparison, old, new)
    return send(request, body, body.pairs)


@router.get("/nodes/{node}", **documented(NodeHistory))
def history(request: Request, node: Node) -> Response:
    """Return the preflights of a node, by its name there or its host name, newest first."""
    with service_of(request).read() as connection:
        body = queries.history(connection, sender(request).only_project, node)
    return send(request, body, body.preflights)
