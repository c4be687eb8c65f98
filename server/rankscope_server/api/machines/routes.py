"""The machines of a run and their samples."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response

from rankscope.wire.sample_columns import SAMPLE_COLUMNS
from rankscope_server.api.machines import queries as machine_queries
from rankscope_server.api.machines import samples as sample_queries
from rankscope_server.api.machines.schema import Machines, Samples
from rankscope_server.api.parameters import Milliseconds, Width, items, one_of
from rankscope_server.api.replies import documented, send
from rankscope_server.api.runs.queries import reading

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["data"])


@router.get("/machines", **documented(Machines))
def machines(request: Request, run: str) -> Response:
    """Return the machines of a run: what is sampled there, and what happened to them."""
    with reading(request, run) as (connection, row):
        body = machine_queries.machines(connection, row)
    return send(request, body, body.machines)


@router.get("/samples", **documented(Samples))
def samples(
    request: Request,
    run: str,
    kind: Annotated[str, one_of(SAMPLE_COLUMNS)] = "host",
    host: str = "",
    names: str = "",
    from_ms: Milliseconds = None,
    to_ms: Milliseconds = None,
    width: Width = 600,
) -> Response:
    """Return samples of one kind over time."""
    with reading(request, run) as (connection, _):
        body = sample_queries.samples(
            connection, run, kind, items(host), items(names), from_ms, to_ms, width
        )
    return send(request, body, body.series)
