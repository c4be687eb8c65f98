"""GET /api/v1/stream: hints of what changed, as server-sent events."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import replace

import sqlalchemy as sa
from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from rankscope_server.access.roles import Principal
from rankscope_server.api.access.rules import sender
from rankscope_server.api.replies import documented_as
from rankscope_server.api.security import is_still
from rankscope_server.api.service import Service, service_of
from rankscope_server.broker import Change, encode
from rankscope_server.problems import Problem
from rankscope_server.store import tables

router = APIRouter(prefix="/api/v1", tags=["stream"])
MAX_TOPICS = 64
_ALL = frozenset({"*"})
_KINDS = {"run": tables.run, "preflight": tables.preflight}
_TOPIC = re.compile(r"runs|run:[A-Za-z0-9._-]{1,128}|preflights|preflight:[A-Za-z0-9._-]{1,64}|\*")


@router.get("/stream", **documented_as("text/event-stream", "Events."))
async def stream(request: Request, topics: str = "runs") -> Response:
    """Send a hint for each change on `topics`: `runs`, `run:{id}`, `preflight:{id}`, `*`..."""
    names = frozenset(name for name in topics.split(",") if name)
    wrong = [name for name in names if not _TOPIC.fullmatch(name)]
    if wrong or not names or len(names) > MAX_TOPICS:
        raise Problem(
            422, "not a list of topics", "topics", "use runs, run:{id}, preflights, preflight:{id}"
        )
    service, principal = service_of(request), sender(request)
    resume = request.headers.get("last-event-id") or request.query_params.get("last_event_id")
    seen = None if principal.only_project is None else Seen(service, principal, names)
    events = _events(request, names, resume, seen)
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


class Seen:
    """What one project may see of the changes; for it the lists change with its own parts alone."""

    def __init__(self, service: Service, principal: Principal, topics: frozenset[str]) -> None:
        self._service, self._principal, self._topics = service, principal, topics

    async def of(self, changes: list[Change]) -> list[Change]:
        """Return those that it may see, of the topics that it asked for."""
        ids = {
            kind: {_id(change) for change in changes if _kind(change) == kind} for kind in _KINDS
        }
        ours = await run_in_threadpool(self._ours, ids)
        found = []
        for change in changes:
            kind = _kind(change)
            if _id(change) not in ours.get(kind, ()):
                continue
            if "*" in self._topics or change.topic in self._topics:
                found.append(change)
            elif f"{kind}s" in self._topics:
                found.append(replace(change, topic=f"{kind}s", changed=(f"{kind}s",), step=None))
        return found

    def _ours(self, ids: dict[str, set[str]]) -> dict[str, set[str]]:
        project, ours = self._principal.project, dict[str, set[str]]()
        with self._service.read() as connection:
            for kind, wanted in ids.items():
                table = _KINDS[kind]
                (key,) = table.primary_key.columns
                found = sa.select(key).where(table.c.project == project, key.in_(wanted))
                ours[kind] = set(connection.scalars(found)) if wanted else set()
        hub = self._service.preflights
        for id in ids["preflight"]:  # one under way may not be stored yet
            live = hub.live(id)
            if live is not None and live.project == project:
                ours["preflight"].add(id)
        return ours


def _kind(change: Change) -> str:
    return change.topic.partition(":")[0]


def _id(change: Change) -> str:
    return change.topic.partition(":")[2]


async def _events(
    request: Request, topics: frozenset[str], resume: str | None, seen: Seen | None
) -> AsyncIterator[bytes]:
    service, principal = service_of(request), sender(request)
    broker, heartbeat_seconds = service.broker, service.settings.heartbeat_seconds
    broker.subscribers += 1
    try:
        point, epoch = broker.resume_point(resume), broker.epoch
        yield b"retry: 2000\n\n"
        while not broker.closed:
            if point is None or broker.epoch != epoch:  # what it has seen is of another life
                point, epoch = broker.last, broker.epoch
                yield f"id: {epoch}-{point}\nevent: reload\ndata: {{}}\n\n".encode()
            if not await is_still(request, principal):
                return  # its token has ended: the reader asks again, and learns why
            changes = broker.since(point, topics if seen is None else _ALL)
            point = broker.last
            if seen is not None and changes:
                changes = await seen.of(changes)
            for change in changes:
                yield encode(broker, change)
            if not changes and not await broker.wait(heartbeat_seconds):
                yield b": heartbeat\n\n"
        yield b"event: stopping\ndata: {}\n\n"  # a reader comes back after the pause above
    finally:
        broker.subscribers -= 1
