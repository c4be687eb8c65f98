"""Advice: what to do next, its history, and what a controller reports that it did."""

from __future__ import annotations

import time
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from rankscope_server.advice import store
from rankscope_server.advice.decide import decide
from rankscope_server.api.advice import queries
from rankscope_server.api.advice.schema import Advice, AdviceHistory
from rankscope_server.api.bodies import field_of, read_body, takes
from rankscope_server.api.findings.queries import verdict
from rankscope_server.api.replies import documented, send
from rankscope_server.api.runs.queries import reading
from rankscope_server.api.service import service_of
from rankscope_server.problems import Problem, request_id
from rankscope_server.store.locks import of_run

router = APIRouter(prefix="/api/v1/runs/{run}/advice", tags=["advice"])
LEAST_VALID_SECONDS = 10.0
MAX_BODY_BYTES = 16 << 10


class Report(msgspec.Struct, forbid_unknown_fields=True):
    """What a controller did with advice."""

    epoch: Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)]
    outcome: Literal["done", "refused", "failed", "ignored"]
    controller: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    text: Annotated[str, msgspec.Meta(max_length=2_000)] = ""


@router.get("", **documented(Advice))
def advice(request: Request, run: str) -> Response:
    """Return what to do next with a run; what is given is recorded."""
    service = service_of(request)
    with reading(request, run) as (connection, row):
        shown = verdict(connection, row)
        seen = queries.situation(connection, row, shown, service.behind_seconds(run))
        decision = decide(seen)
    epoch = service.writer.run(lambda unit: store.epoch_of(unit, run, decision), lock=of_run(run))
    valid_s = max(LEAST_VALID_SECONDS, 3 * service.settings.look_seconds)
    until_ms = (time.time() + valid_s) * 1e3
    with service.read() as connection:
        body = queries.advice(connection, decision, seen, shown, run, epoch, until_ms)
    etag = f'"{epoch[0]}-{epoch[1]}"'
    headers = {
        "ETag": etag, "Cache-Control": f"no-cache, max-age={int(valid_s)}",
        "Rankscope-Valid-Until-Ms": f"{until_ms:.0f}", "X-Request-Id": request_id(request),
    }  # fmt: skip
    known = request.headers.get("if-none-match", "")
    if etag in {tag.strip().removeprefix("W/") for tag in known.split(",")}:
        return Response(None, 304, headers)
    return Response(msgspec.json.encode(body), 200, headers, media_type="application/json")


@router.get("/history", **documented(AdviceHistory))
def history(request: Request, run: str) -> Response:
    """Return what was advised and what was done, the newest first."""
    with reading(request, run) as (connection, _):
        body = queries.history(connection, run)
    return send(request, body, body.given)


@router.post("/reports", openapi_extra=takes(Report), **documented(AdviceHistory))
async def report(request: Request, run: str) -> Response:
    """Take what a controller did with the advice of an epoch."""
    data = await read_body(request, MAX_BODY_BYTES)
    try:
        given = msgspec.json.decode(data, type=Report)
    except (msgspec.MsgspecError, ValueError) as error:
        what, remedy = f"not a Report: {str(error)[:300]}", "see docs/advice.md for the fields"
        raise Problem(422, what, field_of(error), remedy) from error
    return await run_in_threadpool(_report, request, run, given)


def _report(request: Request, run: str, given: Report) -> Response:
    with reading(request, run):
        pass  # the run is there
    is_known = service_of(request).writer.run(
        lambda unit: store.report(
            unit, run, given.epoch, given.controller, given.outcome, given.text
        ),
        lock=of_run(run),
    )
    if not is_known:
        raise Problem(
            409, f"advice {given.epoch} of this run was never given", "epoch",
            f"ask /api/v1/runs/{run}/advice and report the epoch of its answer",
        )  # fmt: skip
    return history(request, run)
