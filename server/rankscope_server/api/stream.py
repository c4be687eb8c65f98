"""GET /api/v1/stream: hints of what changed, as server-sent events."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request, Response
from starlette.responses import StreamingResponse

from rankscope_server.api.replies import documented_as
from rankscope_server.api.service import service_of
from rankscope_server.broker import Broker, encode
from rankscope_server.problems import Problem

router = APIRouter(prefix="/api/v1", tags=["stream"])
MAX_TOPICS = 64
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
    service = service_of(request)
    resume = request.headers.get("last-event-id") or request.query_params.get("last_event_id")
    events = _events(service.broker, names, resume, service.settings.heartbeat_seconds)
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


async def _events(
    broker: Broker, topics: frozenset[str], resume: str | None, heartbeat_seconds: float
) -> AsyncIterator[bytes]:
    broker.subscribers += 1
    try:
        point = broker.resume_point(resume)
        yield b"retry: 2000\n\n"
        if point is None:
            point = broker.last
            identity = f"{broker.epoch}-{point}"
            yield f"id: {identity}\nevent: reload\ndata: {{}}\n\n".encode()
        while not broker.closed:
            changes = broker.since(point, topics)
            point = broker.last
            for change in changes:
                yield encode(broker, change)
            if not changes and not await broker.wait(heartbeat_seconds):
                yield b": heartbeat\n\n"
        yield b"event: stopping\ndata: {}\n\n"  # a reader comes back after the pause above
    finally:
        broker.subscribers -= 1
