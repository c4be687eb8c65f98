"""Runs and their first page."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from rankscope_server.analysis.looks import acknowledge
from rankscope_server.api.replies import documented, send
from rankscope_server.api.report.parts import Origin
from rankscope_server.api.report.queries import report as report_of
from rankscope_server.api.report.schema import Report
from rankscope_server.api.runs import environment as environment_views
from rankscope_server.api.runs import findings as finding_views
from rankscope_server.api.runs.overview import overview
from rankscope_server.api.runs.queries import MAX_LIMIT, list_runs, run_row
from rankscope_server.api.runs.schema import (
    EnvironmentAnswer,
    Finding,
    FindingDetail,
    Findings,
    Overview,
    Runs,
)
from rankscope_server.api.service import service_of
from rankscope_server.problems import not_found

router = APIRouter(prefix="/api/v1", tags=["runs"])
FindingId = Annotated[int, Path(ge=0, lt=1 << 62)]
Attempt = Annotated[int | None, Query(ge=0, le=1 << 20)]


@router.get("/runs", **documented(Runs))
def runs(
    request: Request,
    q: str = "",
    status: str = "",
    limit: Annotated[int, Query(ge=1, le=MAX_LIMIT)] = 50,
    offset: Annotated[int, Query(ge=0, le=1 << 40)] = 0,
) -> Response:
    """List runs, newest first."""
    with service_of(request).read() as connection:
        body = list_runs(connection, q, status, limit, offset)
    return send(request, body, body.runs)


@router.get("/runs/{run}", **documented(Overview))
def run(request: Request, run: str) -> Response:
    """Return the first page of a run."""
    service = service_of(request)
    with service.read() as connection:
        body = overview(connection, run, time.time_ns(), service.settings.silent_after_seconds)
    return send(request, body, body.numbers)


@router.get("/runs/{run}/report", **documented(Report))
def report(request: Request, run: str) -> Response:
    """Return a run on paper: what `rankscope report` shows."""
    service = service_of(request)
    silent_after = service.settings.silent_after_seconds
    with service.read() as connection:
        body = report_of(connection, run, time.time_ns(), silent_after, Origin("server"))
    return send(request, body, body.findings)


@router.get("/runs/{run}/findings", **documented(Findings))
def findings(request: Request, run: str) -> Response:
    """List the findings of a run and the detectors that looked for them."""
    with service_of(request).read() as connection:
        body = finding_views.findings(connection, run_row(connection, run))
    rows: list[Finding] = [*body.open, *body.recovered]
    return send(request, body, rows)


@router.get("/runs/{run}/findings/{id}", **documented(FindingDetail))
def finding(request: Request, run: str, id: FindingId) -> Response:
    """Return a finding with its history."""
    with service_of(request).read() as connection:
        body = finding_views.finding_detail(connection, run_row(connection, run), id)
    return send(request, body, [body])


@router.post("/runs/{run}/findings/{id}/acknowledge", **documented(FindingDetail))
def acknowledge_finding(request: Request, run: str, id: FindingId) -> Response:
    """Mark a finding as seen by a person; it stays open until it recovers."""
    service = service_of(request)
    if not service.writer.run(lambda unit: acknowledge(unit, run, id)):
        raise not_found(f"no finding {id} in run {run}", f"see /api/v1/runs/{run}/findings", "id")
    service.broker.publish(f"run:{run}", {"findings"}, None)
    with service.read() as connection:
        body = finding_views.finding_detail(connection, run_row(connection, run), id)
    return send(request, body, [body])


@router.get("/runs/{run}/environment", **documented(EnvironmentAnswer))
def environment(request: Request, run: str, attempt: Attempt = None) -> Response:
    """Return what differs between the environments of the ranks."""
    with service_of(request).read() as connection:
        row = run_row(connection, run)
        number = row.attempt if attempt is None else attempt
        body = environment_views.environment(connection, run, number, row.world_size)
    return send(request, body, body.differences)
