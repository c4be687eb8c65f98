"""What preflights found: the list, the matrix, the history of a node, a comparison."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from rankscope_server.api.access.rules import preflight_of, sender
from rankscope_server.api.bodies import read, takes
from rankscope_server.api.preflight import matrix as matrices
from rankscope_server.api.preflight import queries
from rankscope_server.api.preflight import view as views
from rankscope_server.api.preflight.network import MAX_ASK_BYTES, call_by_name
from rankscope_server.api.preflight.routes import Node, NodeName, Port, PreflightId
from rankscope_server.api.preflight.schema import (
    NodeHistory,
    PreflightComparison,
    PreflightMatrix,
    PreflightMetric,
    Preflights,
    PreflightView,
)
from rankscope_server.api.replies import documented, send
from rankscope_server.api.service import service_of
from rankscope_server.preflight.dialling import Dialled
from rankscope_server.preflight.hub import reports_of
from rankscope_server.problems import not_found

router = APIRouter(prefix="/api/v1/preflight", tags=["preflight"])
MAX_LIMIT = 500


class CheckPort(msgspec.Struct):
    """A port of a node that the server is to call; the node must have declared it."""

    node: NodeName
    port: Port


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


@router.get("/runs/{id}", **documented(PreflightView))
async def view(request: Request, id: PreflightId) -> Response:
    """Return a preflight as its page shows it: the answer, checks, nodes, the last good one."""
    service = service_of(request)
    hub = service.preflights
    live = await hub.find(id)
    is_here = hub.live(id) is not None
    if is_here and live.stored and live.coordinated == "server" and not hub.is_closed:
        await hub.verdict(live)

    def look() -> PreflightView:
        with service.read() as connection:
            return views.view(live, queries.last_good(connection, live), is_here)

    body = await run_in_threadpool(look)
    return send(request, body, body.findings)


@router.post("/runs/{id}/check", openapi_extra=takes(CheckPort), **documented(Dialled))
async def check(request: Request, id: PreflightId) -> Response:
    """Have the server call a port of a node of a preflight under way, by the node's name."""
    hub = service_of(request).preflights
    hub.check_here()
    asked = await read(request, CheckPort, MAX_ASK_BYTES)
    live = hub.live(id)
    if live is None or live.finished_ns or time.time_ns() >= live.expires_ns:
        raise not_found(
            f"no preflight {id[:64]!r} is under way", "its agents listen only until it ends", "id"
        )
    return send(request, await call_by_name(request, live, asked.node, asked.port))


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
