"""What findings look like."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from rankscope_server.api.pictures.queries import picture, rows_of
from rankscope_server.api.pictures.schema import FindingPicture
from rankscope_server.api.replies import documented, send
from rankscope_server.api.runs.queries import reading

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["runs"])


@router.get("/findings/{id}/picture", **documented(FindingPicture))
def finding_picture(
    request: Request, run: str, id: Annotated[int, Path(ge=0, lt=1 << 62)]
) -> Response:
    """Return what a finding rests on, around its onset: numbers, samples, who did what when."""
    with reading(request, run) as (connection, row):
        body = picture(connection, row, id)
    return send(request, body, rows_of(body))
