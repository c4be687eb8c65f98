"""The report of a run."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response

from rankscope_server.api.replies import documented, send
from rankscope_server.api.report.parts import Origin
from rankscope_server.api.report.queries import report as report_of
from rankscope_server.api.report.schema import Report
from rankscope_server.api.service import service_of

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["runs"])


@router.get("/report", **documented(Report))
def report(request: Request, run: str) -> Response:
    """Return a run on paper: what `rankscope report` shows."""
    service = service_of(request)
    silent_after = service.silent_after_seconds(run)
    with service.read() as connection:
        body = report_of(connection, run, time.time_ns(), silent_after, Origin("server"))
    return send(request, body, body.findings)
