"""Rankscope itself."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from rankscope_server.api.replies import documented, send
from rankscope_server.api.server import queries
from rankscope_server.api.server.schema import ServerAnswer
from rankscope_server.api.service import service_of

router = APIRouter(prefix="/api/v1", tags=["operations"])


@router.get("/server", **documented(ServerAnswer))
def server(request: Request) -> Response:
    """Say how Rankscope itself is: its parts, what it sees of live runs, its own numbers."""
    body = queries.server(service_of(request))
    return send(request, body, body.figures)
