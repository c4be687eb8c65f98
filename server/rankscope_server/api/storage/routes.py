"""Sizes, the plan of retention, pins, and the deletion of a run."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from rankscope_server.api.replies import documented, send
from rankscope_server.api.service import service_of
from rankscope_server.api.storage import queries
from rankscope_server.api.storage.schema import (
    DeletionRow,
    PinAnswer,
    ReleaseAnswer,
    RetentionAnswer,
    StorageAnswer,
)
from rankscope_server.problems import Problem
from rankscope_server.store import deletion
from rankscope_server.store.locks import of_run

router = APIRouter(prefix="/api/v1", tags=["storage"])


@router.get("/storage", **documented(StorageAnswer))
def storage(request: Request) -> Response:
    """Return how much is stored, by kind and by run."""
    body = queries.storage(service_of(request))
    return send(request, body, body.runs)


@router.get("/retention", **documented(RetentionAnswer))
def retention(request: Request) -> Response:
    """Return what retention would remove now, and what it does; nothing is removed by asking."""
    body = queries.retention(service_of(request))
    return send(request, body, body.planned)


@router.post("/retention", **documented(RetentionAnswer))
def begin_retention(request: Request) -> Response:
    """Begin a round now; the answer is what it will remove."""
    service = service_of(request)
    body = queries.retention(service)
    service.retention.wake()
    return send(request, body, body.planned)


@router.delete("/runs/{run}", **documented(DeletionRow))
def delete_run(
    request: Request, run: str, confirm: Annotated[str, Query(max_length=256)] = ""
) -> Response:
    """Delete a run for good. `confirm` repeats its id. It is gone from pages at once."""
    if confirm != run:
        raise Problem(
            422, "the deletion is not confirmed", "confirm",
            "repeat the id of the run as confirm: what is deleted cannot be brought back",
        )  # fmt: skip
    service = service_of(request)
    service.retention.delete(run)
    with service.read() as connection:
        body = queries.deletion(connection, run)
    return send(request, body, [body])


@router.get("/deletions/{run}", **documented(DeletionRow))
def show_deletion(request: Request, run: str) -> Response:
    """Return how far the deletion of a run is."""
    with service_of(request).read() as connection:
        body = queries.deletion(connection, run)
    return send(request, body, [body])


@router.delete("/deletions/{run}", **documented(ReleaseAnswer))
def release_run(request: Request, run: str) -> Response:
    """Let the id of a deleted run be used again."""
    service_of(request).writer.run(lambda unit: deletion.release(unit, run), lock=of_run(run))
    return send(request, ReleaseAnswer(run_id=run, is_released=True))


@router.put("/runs/{run}/pin", **documented(PinAnswer))
def pin_run(request: Request, run: str) -> Response:
    """Pin a run: neither retention nor a deletion touches it."""
    return _pin(request, run, is_wanted=True)


@router.delete("/runs/{run}/pin", **documented(PinAnswer))
def unpin_run(request: Request, run: str) -> Response:
    """Unpin a run."""
    return _pin(request, run, is_wanted=False)


def _pin(request: Request, run: str, *, is_wanted: bool) -> Response:
    service = service_of(request)
    service.writer.run(lambda unit: deletion.set_pin(unit, run, is_wanted), lock=of_run(run))
    service.broker.publish("runs", {"runs"}, None)
    return send(request, PinAnswer(run_id=run, is_pinned=is_wanted))
