"""Many people look at one run: what they ask after the same hint is answered once.

An answer about a run is given again to who may see the same and asks the same, unless a hint about
the run went out since it was begun: what the hint is about was stored before. What was changed by a
request is seen by the next one. Where few listen nothing is shared, and every answer is of now.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeAlias
from urllib.parse import unquote

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rankscope_server.api.security import principal_of
from rankscope_server.api.service import Service
from rankscope_server.problems import request_id

FEW = 16  # who follow the event stream
MOST_SECONDS = 2.0  # of what changes without a hint, as silence does
MOST_BYTES = 16 << 20  # of all answers together
_RUNS = "/api/v1/runs/"
_INGEST = "/api/v1/ingest"
_LARGE = "/trace"  # sent as it is made
_Key: TypeAlias = tuple[object, ...]


@dataclass(slots=True)
class _Answer:
    """An answer as it was sent, or one that is under way."""

    begun: float
    start: Message = field(default_factory=dict)
    body: bytes = b""
    is_there: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_good(self) -> bool:
        """Return whether it may be given again."""
        return self.start.get("status") == 200


class SharedAnswers:
    """ASGI middleware behind the Guard, around what packs answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._answers: OrderedDict[_Key, _Answer] = OrderedDict()
        self._bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer from what was answered just now, or pass on and keep the answer."""
        request = Request(scope) if scope["type"] == "http" else None
        if request is not None and request.method not in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            if scope["path"] != _INGEST:
                self._forget()
            return
        key = None if request is None or not _is_shared(request) else _key_of(request)
        if request is None or key is None:
            await self._app(scope, receive, send)
            return
        answer = self._known(key, request)
        if answer is not None:
            await answer.is_there.wait()
        if answer is None or not answer.is_good:
            answer = await self._ask(key, scope, receive)
        await _give(answer, request, send)

    def _known(self, key: _Key, request: Request) -> _Answer | None:
        """Return an answer that holds still."""
        answer = self._answers.get(key)
        service: Service = request.scope["app"].state.service
        run = unquote(request.url.path[len(_RUNS) :].partition("/")[0])
        hinted = service.broker.hinted_at(f"run:{run}")
        now = time.monotonic()
        if answer is None or answer.begun < hinted or now - answer.begun > MOST_SECONDS:
            return None
        return answer

    async def _ask(self, key: _Key, scope: Scope, receive: Receive) -> _Answer:
        """Let the app answer in full, whatever the sender has, and keep it."""
        answer = _Answer(time.monotonic())
        self._drop(key)
        self._answers[key] = answer

        async def take(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.start = message
            else:
                answer.body += message.get("body", b"")

        names = [one for one in scope["headers"] if one[0] != b"if-none-match"]
        try:
            await self._app({**scope, "headers": names}, receive, take)
        finally:
            answer.is_there.set()
            if self._answers.get(key) is answer:
                if answer.is_good:
                    self._bytes += len(answer.body)
                else:
                    del self._answers[key]
            while self._bytes > MOST_BYTES and self._answers:
                self._drop(next(iter(self._answers)))
        return answer

    def _drop(self, key: _Key) -> None:
        answer = self._answers.pop(key, None)
        if answer is not None and answer.is_there.is_set():
            self._bytes -= len(answer.body)

    def _forget(self) -> None:
        self._answers.clear()
        self._bytes = 0


def _is_shared(request: Request) -> bool:
    service: Service = request.scope["app"].state.service
    return service.broker.subscribers > FEW


def _key_of(request: Request) -> _Key | None:
    """Return what makes two questions the same; None for one that is not shared."""
    path, principal = request.url.path, principal_of(request)
    if principal is None or principal.preflight or not path.startswith(_RUNS):
        return None
    if path.endswith(_LARGE):
        return None
    return (
        principal.roles, principal.project, request.method, path, request.url.query,
        request.headers.get("accept-encoding", ""),
    )  # fmt: skip


async def _give(answer: _Answer, request: Request, send: Send) -> None:
    """Send an answer; to who has it already, that it still holds."""
    headers = MutableHeaders(raw=list(answer.start["headers"]))
    if "x-request-id" in headers:
        headers["x-request-id"] = request_id(request)
    status, body = answer.start["status"], answer.body
    if answer.is_good and headers.get("etag") in _etags(request.headers):
        status, body = 304, b""
        for name in ("content-length", "content-type", "content-encoding"):
            del headers[name]
    await send({"type": "http.response.start", "status": status, "headers": headers.raw})
    await send({"type": "http.response.body", "body": body})


def _etags(asked: Headers) -> set[str]:
    known = asked.get("if-none-match", "")
    return {tag.strip().removeprefix("W/") for tag in known.split(",")}
