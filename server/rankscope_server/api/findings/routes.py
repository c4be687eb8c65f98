"""Findings, and that a person has seen one."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from rankscope_server.analysis.stored_findings import acknowledge
from rankscope_server.api.findings import queries as finding_queries
from rankscope_server.api.findings.schema import FindingDetail, Findings, ShownFinding
from rankscope_server.api.replies import documented, send
from rankscope_server.api.runs.queries import rate_in, reading, run_row
from rankscope_server.api.service import service_of
from rankscope_server.problems import not_found
from rankscope_server.store.locks import of_run

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["runs"])

FindingId = Annotated[int, Path(ge=0, lt=1 << 62)]


@router.get("/findings", **documented(Findings))
def findings(request: Request, run: str) -> Response:
    """List the findings of a run and the detectors that looked for them."""
    with reading(request, run) as (connection, row):
        body = finding_queries.findings(connection, row, rate_in(request, connection, row))
    rows: list[ShownFinding] = [*body.open, *body.recovered]
    return send(request, body, rows)


@router.get("/findings/{id}", **documented(FindingDetail))
def finding(request: Request, run: str, id: FindingId) -> Response:
    """Return a finding with its history."""
    with reading(request, run) as (connection, row):
        rate = rate_in(request, connection, row)
        body = finding_queries.finding_detail(connection, row, id, rate)
    return send(request, body, [body])


@router.post("/findings/{id}/acknowledge", **documented(FindingDetail))
def acknowledge_finding(request: Request, run: str, id: FindingId) -> Response:
    """Mark a finding as seen by a person; it stays open until it recovers."""
    service = service_of(request)
    if not service.writer.run(lambda unit: acknowledge(unit, run, id), lock=of_run(run)):
        raise not_found(f"no finding {id} in run {run}", f"see /api/v1/runs/{run}/findings", "id")
    service.broker.publish(f"run:{run}", {"findings"}, None)
    with service.read() as connection:
        row = run_row(connection, run)
        rate = rate_in(request, connection, row)
        body = finding_queries.finding_detail(connection, row, id, rate)
    return send(request, body, [body])
