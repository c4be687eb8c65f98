"""Searches that are kept, for all who use this server, or a project of it."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
from fastapi import APIRouter, Path, Request, Response
from starlette.concurrency import run_in_threadpool

from rankscope_server.answers import of_row
from rankscope_server.api.access.rules import sender
from rankscope_server.api.bodies import field_of, read_body, takes
from rankscope_server.api.logs.queries import parse_box
from rankscope_server.api.logs.schema import SavedSearch, SavedSearches
from rankscope_server.api.replies import documented, send
from rankscope_server.api.service import service_of
from rankscope_server.problems import Problem, not_found
from rankscope_server.store.saved_searches import (
    MAX_SEARCHES,
    drop_search,
    keep_search,
    read_searches,
)

router = APIRouter(prefix="/api/v1/searches", tags=["logs"])
MAX_BODY_BYTES = 1 << 16
SearchId = Annotated[int, Path(ge=0, lt=1 << 62)]


class KeepSearch(msgspec.Struct):
    """A search to keep, in place of one of the same name."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=r"\S")]
    q: Annotated[str, msgspec.Meta(min_length=1, max_length=2_000, pattern=r"\S")]


@router.get("", **documented(SavedSearches))
def searches(request: Request) -> Response:
    """List the searches that are kept."""
    return _all(request)


@router.post("", openapi_extra=takes(KeepSearch), **documented(SavedSearches))
async def keep(request: Request) -> Response:
    """Keep a search under a name."""
    body = await read_body(request, MAX_BODY_BYTES)
    try:
        wanted = msgspec.json.decode(body, type=KeepSearch)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Problem(
            422, f"not a search: {str(error)[:300]}", field_of(error),
            'send {"name": "what it is", "q": "what the search box holds"}',
        ) from error  # fmt: skip
    return await run_in_threadpool(_keep, request, wanted)


@router.delete("/{id}", **documented(SavedSearches))
def drop(request: Request, id: SearchId) -> Response:
    """Drop a search; return those that are left."""
    if not service_of(request).writer.run(lambda unit: drop_search(unit, _project(request), id)):
        raise not_found(f"no search {id} is kept", "see /api/v1/searches", "id")
    return _all(request)


def _keep(request: Request, wanted: KeepSearch) -> Response:
    parse_box(wanted.q, time.time_ns())
    name = wanted.name.strip().replace("\x00", "")
    q = wanted.q.replace("\x00", "")
    if not name or not q.strip():
        raise Problem(422, "a search without name or text", "name", "give both")
    project = _project(request)
    if not service_of(request).writer.run(lambda unit: keep_search(unit, project, name, q)):
        raise Problem(409, f"{MAX_SEARCHES} searches are kept already", "name", "drop one first")
    return _all(request)


def _project(request: Request) -> str:
    return sender(request).only_project or "*"


def _all(request: Request) -> Response:
    with service_of(request).read() as connection:
        rows = [of_row(SavedSearch, row) for row in read_searches(connection, _project(request))]
    return send(request, SavedSearches(searches=rows), rows)
