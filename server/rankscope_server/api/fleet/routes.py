"""All runs together."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from rankscope_server.api.access.rules import sender
from rankscope_server.api.fleet.queries import fleet
from rankscope_server.api.fleet.schema import Fleet
from rankscope_server.api.replies import documented, send
from rankscope_server.api.service import service_of

router = APIRouter(prefix="/api/v1/fleet", tags=["runs"])
MAX_WEEKS = 26


@router.get("", **documented(Fleet))
def all_runs(request: Request, weeks: Annotated[int, Query(ge=1, le=MAX_WEEKS)] = 8) -> Response:
    """Return the live runs, hosts over runs, rank-hours by week and silent agents of a project."""
    service = service_of(request)
    now_ns = time.time_ns()
    silent_before_ns = now_ns - int(service.settings.silent_after_seconds * 1e9)
    with service.read() as connection:
        body = fleet(connection, sender(request).only_project, weeks, now_ns, silent_before_ns)
    return send(request, body, body.hosts)
