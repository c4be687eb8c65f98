"""Gives each request its id, and writes one line about it once it is over."""

from __future__ import annotations

import asyncio
import logging
import time

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rankscope_server.own_log import begin_request
from rankscope_server.problems import Problem, answer, request_id

log = logging.getLogger("rankscope_server.requests")
_STOPPING = Problem(503, "the server is stopping", None, "send again to the next server")


class RequestLog:
    """ASGI middleware around everything else. The line is of level info."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and log its end. The query is not logged: it may hold a search."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        begin_request(request_id(request))
        began, status = time.perf_counter(), 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except asyncio.CancelledError:  # its time is over: the server ends
            if not status:
                await answer(request, _STOPPING)(scope, receive, noting)
        finally:
            if log.isEnabledFor(logging.INFO):
                took_ms = (time.perf_counter() - began) * 1e3
                method, path = scope["method"], scope["path"]
                log.info(
                    "%s %r %d in %.1f ms", method, path, status, took_ms,
                    extra={
                        "method": method, "path": path, "status": status,
                        "duration_ms": round(took_ms, 1),
                    },
                )  # fmt: skip
