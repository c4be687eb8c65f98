"""What a run cost."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from rankscope_server.api.cost.queries import cost
from rankscope_server.api.cost.schema import RunCost
from rankscope_server.api.replies import documented, send
from rankscope_server.api.runs.queries import rate_in, reading

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["runs"])


@router.get("/cost", **documented(RunCost))
def run_cost(request: Request, run: str) -> Response:
    """Return where the time of all ranks went, and what changes would give."""
    with reading(request, run) as (connection, row):
        body = cost(row, rate_in(request, connection, row))
    return send(request, body, body.parts)
