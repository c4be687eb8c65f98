"""How the ranks of a run share the work."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from rankscope_server.api.parallelism.queries import parallelism
from rankscope_server.api.parallelism.schema import Parallelism, placed_ranks
from rankscope_server.api.replies import documented, send
from rankscope_server.api.runs.queries import reading

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["data"])


@router.get("/parallelism", **documented(Parallelism))
def run_parallelism(request: Request, run: str) -> Response:
    """Return the mesh of ranks with their numbers, its groups, and what a pipeline idles."""
    with reading(request, run) as (connection, row):
        body = parallelism(connection, row)
    rows = placed_ranks(body.mesh) if request.query_params.get("format") == "csv" else ()
    return send(request, body, rows)
