"""What was communicated in some steps of a run."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from rankscope_server.api.communication import queries
from rankscope_server.api.communication.schema import Communication
from rankscope_server.api.parameters import Attempt, From, To
from rankscope_server.api.ranks.chunks import Wanted
from rankscope_server.api.replies import documented, send
from rankscope_server.api.runs.queries import reading

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["data"])


@router.get("/communication", **documented(Communication))
def communication(
    request: Request, run: str, lo: From = None, hi: To = None, attempt: Attempt = None
) -> Response:
    """Return how long and how fast calls were, who arrived last, and the links between nodes."""
    with reading(request, run) as (connection, row):
        body = queries.communication(connection, row, Wanted(run, attempt, None, lo, hi))
    return send(request, body, body.rows)
