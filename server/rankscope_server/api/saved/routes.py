"""Searches and views that are kept, for all who use this server, or a project of it."""

from __future__ import annotations

import time
from typing import Annotated, TypeVar

import msgspec
from fastapi import APIRouter, Path, Request, Response
from starlette.concurrency import run_in_threadpool

from rankscope_server.answers import of_row
from rankscope_server.api import deeds
from rankscope_server.api.access.rules import sender
from rankscope_server.api.bodies import field_of, read_body, takes
from rankscope_server.api.logs.queries import parse_box
from rankscope_server.api.replies import documented, send
from rankscope_server.api.saved.schema import SavedSearch, SavedSearches, SavedView, SavedViews
from rankscope_server.api.service import service_of
from rankscope_server.problems import Problem, not_found
from rankscope_server.store.saved import (
    MAX_SAVED,
    SEARCHES,
    VIEWS,
    Shelf,
    drop_saved,
    read_saved,
    save,
)

router = APIRouter(prefix="/api/v1", tags=["saved"])
MAX_BODY_BYTES = 1 << 16
SavedId = Annotated[int, Path(ge=0, lt=1 << 62)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=r"\S")]
# A path from the root of the dashboard and its query: nothing that leads elsewhere.
_ADDRESS = r"^[a-z][a-z-]*(/[^\s?#:/\\]+)*(\?[^\s#]*)?$"


class KeepSearch(msgspec.Struct):
    """A search to keep, in place of one of the same name."""

    name: Name
    q: Annotated[str, msgspec.Meta(min_length=1, max_length=2_000, pattern=r"\S")]


class KeepView(msgspec.Struct):
    """A view to keep, in place of one of the same name."""

    name: Name
    address: Annotated[str, msgspec.Meta(min_length=1, max_length=4_000, pattern=_ADDRESS)]


_Wanted = TypeVar("_Wanted", KeepSearch, KeepView)


@router.get("/searches", **documented(SavedSearches))
def searches(request: Request) -> Response:
    """List the searches that are kept."""
    return _all(request, SEARCHES)


@router.post("/searches", openapi_extra=takes(KeepSearch), **documented(SavedSearches))
async def keep_search(request: Request) -> Response:
    """Keep a search under a name."""
    wanted = await _wanted(
        request, KeepSearch, 'send {"name": "what it is", "q": "what the search box holds"}'
    )
    parse_box(wanted.q, time.time_ns())
    return await run_in_threadpool(_keep, request, SEARCHES, wanted.name, wanted.q)


@router.delete("/searches/{id}", **documented(SavedSearches))
def drop_search(request: Request, id: SavedId) -> Response:
    """Drop a search; return those that are left."""
    return _drop(request, SEARCHES, id, "search")


@router.get("/views", **documented(SavedViews))
def views(request: Request) -> Response:
    """List the views that are kept."""
    return _all(request, VIEWS)


@router.post("/views", openapi_extra=takes(KeepView), **documented(SavedViews))
async def keep_view(request: Request) -> Response:
    """Keep a view under a name."""
    wanted = await _wanted(
        request, KeepView, 'send {"name": "what it is", "address": "runs/*/logs?level=error"}'
    )
    return await run_in_threadpool(_keep, request, VIEWS, wanted.name, wanted.address)


@router.delete("/views/{id}", **documented(SavedViews))
def drop_view(request: Request, id: SavedId) -> Response:
    """Drop a view; return those that are left."""
    return _drop(request, VIEWS, id, "view")


async def _wanted(request: Request, kind: type[_Wanted], remedy: str) -> _Wanted:
    body = await read_body(request, MAX_BODY_BYTES)
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Problem(
            422, f"this cannot be kept: {str(error)[:300]}", field_of(error), remedy
        ) from error


def _keep(request: Request, shelf: Shelf, name: str, text: str) -> Response:
    name, text = (value.replace("\x00", "").strip() for value in (name, text))
    if not name or not text:
        raise Problem(422, "a name or its text is empty", "name", "give both")
    deeds.add(request, target=name)
    project = _project(request)
    if not service_of(request).writer.run(lambda unit: save(unit, shelf, project, name, text)):
        raise Problem(409, f"{MAX_SAVED} are kept already", "name", "drop one first")
    return _all(request, shelf)


def _drop(request: Request, shelf: Shelf, row_id: int, noun: str) -> Response:
    project = _project(request)
    if not service_of(request).writer.run(lambda unit: drop_saved(unit, shelf, project, row_id)):
        raise not_found(f"no {noun} {row_id} is kept", f"ask for the {noun}s that are", "id")
    return _all(request, shelf)


def _project(request: Request) -> str:
    return sender(request).only_project or "*"


def _all(request: Request, shelf: Shelf) -> Response:
    with service_of(request).read() as connection:
        rows = read_saved(connection, shelf, _project(request))
    if shelf is VIEWS:
        found = [of_row(SavedView, row) for row in rows]
        return send(request, SavedViews(views=found), found)
    kept = [of_row(SavedSearch, row) for row in rows]
    return send(request, SavedSearches(searches=kept), kept)
