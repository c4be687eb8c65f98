"""Some ranks in some steps."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from rankscope_server.api.parameters import MAX_STEP, rank_ranges
from rankscope_server.api.replies import documented, send
from rankscope_server.api.runs.queries import reading
from rankscope_server.api.selection.queries import MAX_RANGES, selection
from rankscope_server.api.selection.schema import Selection
from rankscope_server.problems import Problem

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["data"])


@router.get("/selection", **documented(Selection))
def run_selection(
    request: Request,
    run: str,
    ranks: str,
    lo: Annotated[int, Query(alias="from", ge=1, le=MAX_STEP)],
    hi: Annotated[int, Query(alias="to", ge=1, le=MAX_STEP)],
) -> Response:
    """Return how some ranks deviate in some steps, and what they have in common."""
    ranges = rank_ranges(ranks)
    if len(ranges) > MAX_RANGES:
        raise Problem(
            422, f"{len(ranges):,} ranges of ranks", "ranks", f"give at most {MAX_RANGES}"
        )
    with reading(request, run) as (connection, row):
        body = selection(connection, row, ranges, lo, hi)
    return send(request, body, body.common)
