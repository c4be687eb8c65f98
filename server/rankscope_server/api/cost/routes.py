"""What a run cost."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from rankscope_server.api.cost.queries import cost
from rankscope_server.api.cost.schema import RunCost
from rankscope_server.api.replies import documented, send
from rankscope_server.api.runs.queries import reading

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["runs"])


@router.get("/cost", **documented(RunCost))
def run_cost(request: Request, run: str) -> Response:
    """Return where the time of all ranks went, and what changes would give."""
    with reading(request, run) as (_, row):
        body = cost(row)
    return send(request, body, body.parts)
