"""Who waits for whom."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from rankscope_server.api.hang import queries
from rankscope_server.api.hang.schema import HangAnswer, plain_rows
from rankscope_server.api.parameters import Attempt, items, ranks_of
from rankscope_server.api.replies import documented, send
from rankscope_server.api.runs.queries import reading

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["data"])
Ranks = Annotated[str, Query(max_length=200)]
GroupName = Annotated[str, Query(max_length=256)]


@router.get("/hang", **documented(HangAnswer))
def hang(
    request: Request, run: str, attempt: Attempt = None, ranks: Ranks = "", group: GroupName = ""
) -> Response:
    """Return who waits for whom, where each member of a group is, and stacks side by side."""
    chosen = ranks_of(items(ranks))
    with reading(request, run) as (connection, row):
        body = queries.hang(connection, row, attempt, chosen, group)
    return send(request, body, plain_rows(body.groups))
