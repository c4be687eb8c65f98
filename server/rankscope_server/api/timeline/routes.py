"""One step: its timeline with the answer, and its trace for Perfetto."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from starlette.responses import StreamingResponse

from rankscope_server.api.parameters import MAX_STEP, Rank
from rankscope_server.api.replies import documented, documented_as, send
from rankscope_server.api.runs.queries import reading
from rankscope_server.api.service import service_of
from rankscope_server.api.timeline import queries
from rankscope_server.api.timeline import trace as traces
from rankscope_server.api.timeline.lanes import LANES, MAX_LANES, parse_ranks
from rankscope_server.api.timeline.schema import StepTimeline
from rankscope_server.problems import Problem, request_id

router = APIRouter(prefix="/api/v1/runs/{run}/steps/{step}", tags=["data"])
Step = Annotated[int, Path(ge=1, le=MAX_STEP)]
Ranks = Annotated[str, Query(max_length=2_000)]


@router.get("", **documented(StepTimeline))
def step_timeline(
    request: Request,
    run: str,
    step: Step,
    ranks: Ranks = "",
    also: Rank = None,
    lanes: Annotated[int, Query(ge=1, le=MAX_LANES)] = LANES,
) -> Response:
    """Return one step: why it is slow or not, and what each rank did when.

    Without `ranks` those that matter most, and `also` one more.
    """
    with reading(request, run) as (connection, row):
        body = queries.step_timeline(connection, row, step, ranks, also, lanes)
    return send(request, body, body.lanes)


@router.get(
    "/trace",
    response_class=StreamingResponse,
    **documented_as("application/json", "A Chrome trace: ui.perfetto.dev opens it."),
)
def trace(
    request: Request,
    run: str,
    step: Step,
    to: Annotated[int | None, Query(ge=1, le=MAX_STEP)] = None,
    ranks: Ranks = "",
) -> Response:
    """Return a step, or those up to another, as a Chrome trace with arrows between ranks."""
    last = step if to is None else to
    if not step <= last < step + traces.MAX_STEPS:
        raise Problem(
            422, f"steps {step} to {last} are not 1 to {traces.MAX_STEPS} steps", "to",
            "ask for fewer",
        )  # fmt: skip
    with reading(request, run) as (connection, row):
        recorded = queries.read_step_of(connection, row, step)
        chosen = parse_ranks(ranks, recorded.height)
    last = min(last, max(row.step, step))
    steps = f"step{step}" if last == step else f"steps{step}-{last}"
    name = re.sub(r"[^\w.-]+", "_", run, flags=re.ASCII)
    headers = {
        "Content-Disposition": f'attachment; filename="{name}-{steps}.trace.json"',
        "Cache-Control": "no-store",
        "X-Request-Id": request_id(request),
    }
    parts = traces.trace_parts(service_of(request).reader, row, step, last, chosen)
    return StreamingResponse(parts, 200, headers, media_type="application/json")
