"""The first page of a run."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from msgspec import structs

from rankscope_server.api.overview.queries import overview
from rankscope_server.api.overview.schema import Overview
from rankscope_server.api.replies import documented, send
from rankscope_server.api.runs.old_answers import as_of_now
from rankscope_server.api.service import service_of

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["runs"])


@router.get("", **documented(Overview))
def run(request: Request, run: str) -> Response:
    """Return the first page of a run."""
    service = service_of(request)
    with service.read() as connection:
        body = overview(
            connection, run, service.silent_before_ns(run), service.settings.price_list()
        )
    behind_seconds = service.behind_seconds(run)
    head = body.run
    body = structs.replace(
        body, answer=as_of_now(body.answer, head.status, behind_seconds),
        run=structs.replace(head, answer=as_of_now(head.answer, head.status, behind_seconds)),
    )  # fmt: skip
    return send(request, body, body.numbers)
