"""Who waits for whom."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from rankscope.wire.schema import MAX_RANK
from rankscope_server.api.hang import queries
from rankscope_server.api.hang.schema import HangAnswer, plain_rows
from rankscope_server.api.parameters import Attempt, items
from rankscope_server.api.replies import documented, send
from rankscope_server.api.runs.queries import reading
from rankscope_server.problems import Problem

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["data"])
Ranks = Annotated[str, Query(max_length=200)]
GroupName = Annotated[str, Query(max_length=256)]


@router.get("/hang", **documented(HangAnswer))
def hang(
    request: Request, run: str, attempt: Attempt = None, ranks: Ranks = "", group: GroupName = ""
) -> Response:
    """Return who waits for whom, where each member of a group is, and stacks side by side."""
    chosen = _ranks(ranks)
    with reading(request, run) as (connection, row):
        body = queries.hang(connection, row, attempt, chosen, group)
    return send(request, body, plain_rows(body.groups))


def _ranks(text: str) -> list[int]:
    """Return the ranks of a list such as "17,3". Raises Problem 422."""
    found = items(text)
    if not all(item.isdecimal() and item.isascii() and int(item) <= MAX_RANK for item in found):
        raise Problem(422, f"{text[:40]!r} is no list of ranks", "ranks", "give them as in 17,3")
    return [int(item) for item in found]
