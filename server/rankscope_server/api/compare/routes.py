"""Two runs, attempts or ranges of steps beside each other."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from rankscope_server.api.access.rules import sender
from rankscope_server.api.compare import queries
from rankscope_server.api.compare.schema import Comparison
from rankscope_server.api.compare.sides import Asked
from rankscope_server.api.parameters import MAX_STEP, Attempt, From, To
from rankscope_server.api.replies import documented, send
from rankscope_server.api.runs.queries import reading, run_row
from rankscope_server.problems import no_run

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["data"])
_Step = Annotated[int | None, Query(ge=0, le=MAX_STEP)]


@router.get("/compare", **documented(Comparison))
def compare(
    request: Request,
    run: str,
    before: Annotated[str, Query(max_length=512)] = "",
    attempt: Attempt = None,
    lo: From = None,
    hi: To = None,
    before_attempt: Attempt = None,
    before_from: _Step = None,
    before_to: _Step = None,
) -> Response:
    """Return what changed since another run; by default since the one before of its name."""
    old, new = Asked(before_attempt, before_from, before_to), Asked(attempt, lo, hi)
    with reading(request, run) as (connection, row):
        earlier = run_row(connection, before) if before else None
        if earlier is not None and not sender(request).sees(earlier.project):
            raise no_run(before)
        body = queries.comparison(connection, earlier, row, old, new)
    return send(request, body, body.parts)
