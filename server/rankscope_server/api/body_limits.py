"""Bodies of all requests together: bounded in memory, in slowness, and by the quota of a token."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rankscope_server.access.quotas import Quota
from rankscope_server.api.bodies import are_vitals
from rankscope_server.api.security import principal_of
from rankscope_server.problems import Problem, answer
from rankscope_server.settings import Settings

LEAST_BYTES_PER_SECOND = 64 << 10  # beyond the first pause: half a megabit per second
RETRY_AFTER_S = 1.0
_VITALS_BYTES = 4 << 20  # more of all bodies, for what goes past bulk
_INGEST = "/api/v1/ingest"
_SENDING = frozenset({_INGEST, "/v1/traces", "/v1/logs", "/v1/metrics"})
_NOT_KEPT = "/api/v1/net/blob"  # its bytes are forgotten as they come


class BodyLimits:
    """ASGI middleware behind the Guard, which knows who sends."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._max_bytes = max(settings.max_bodies_bytes, settings.max_batch_bytes)
        self._pause_s = settings.body_seconds
        self._bytes = 0  # of all bodies in work
        self.quota = Quota("bytes")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a body that is too much now, else pass it on as it comes."""
        request = Request(scope) if scope["type"] == "http" else None
        if request is None or not _has_body(request):
            await self._app(scope, receive, send)
            return
        principal, body = principal_of(request), Body(self, request, receive)
        by_quota = True
        try:
            if principal is not None:  # a stranger's words are not believed, its bytes are counted
                self.quota.check(principal)
                by_quota = False
                body.announce(_declared(request))
        except Problem as problem:
            self._note(request, by_quota)
            await answer(request, problem)(scope, receive, send)
            return
        try:
            await self._app(scope, body.receive, send)
        finally:
            self._bytes -= body.reserved

    def _note(self, request: Request, by_quota: bool) -> None:
        """Let the analysis know that a batch was put off: its ranks are not silent."""
        service = getattr(request.scope["app"].state, "service", None)
        if service is not None and request.url.path in _SENDING:
            service.intake.put_off(by_quota=by_quota)

    @property
    def pause_s(self) -> float:
        """Return how long a body may pause."""
        return self._pause_s

    def reserve(self, size: int, *, is_urgent: bool = False) -> None:
        """Count bytes that will be in memory. Raises Problem 429."""
        if self._bytes + size > self._max_bytes + (_VITALS_BYTES if is_urgent else 0):
            raise Problem(
                429, "too many bytes are in work", "body",
                "send again; raise max_bodies_bytes where the server has the memory",
                RETRY_AFTER_S,
            )  # fmt: skip
        self._bytes += size

    def can_hold(self, size: int) -> bool:
        """Return whether a body would fit alone; where it is read, a larger one is refused."""
        return size <= self._max_bytes


class Body:
    """One body, counted as it comes."""

    def __init__(self, limits: BodyLimits, request: Request, receive: Receive) -> None:
        self._limits, self._receive = limits, receive
        self._principal = principal_of(request)
        self._is_kept = request.url.path != _NOT_KEPT
        self._is_urgent = request.url.path == _INGEST and are_vitals(request)
        self._started_s = time.monotonic()
        self._size = 0
        self._is_over = False
        self.reserved = 0

    def announce(self, size: int) -> None:
        """Reserve what was declared, so that bodies do not starve each other half-way."""
        if self._is_kept and self._limits.can_hold(size):
            self._limits.reserve(size, is_urgent=self._is_urgent)
            self.reserved = size

    async def receive(self) -> Message:
        """Return the next message of the server. Raises Problem 408, 429."""
        if self._is_over:
            return await self._receive()  # that waits for the caller to go away
        try:
            message = await asyncio.wait_for(self._receive(), self._limits.pause_s)
        except TimeoutError:
            raise _too_slow() from None
        if message["type"] != "http.request":
            return message
        self._is_over = not message.get("more_body", False)
        self._count(len(message.get("body", b"")))
        return message

    def _count(self, size: int) -> None:
        self._size += size
        if self._is_kept and self._size > self.reserved:
            self._limits.reserve(self._size - self.reserved)
            self.reserved = self._size
        if self._principal is not None:
            self._limits.quota.count(self._principal, size)
        allowed_s = self._limits.pause_s + self._size / LEAST_BYTES_PER_SECOND
        if not self._is_over and time.monotonic() - self._started_s > allowed_s:
            raise _too_slow()


def _too_slow() -> Problem:
    return Problem(408, "the body came too slowly", "body", "send again, or smaller batches")


def _has_body(request: Request) -> bool:
    return "transfer-encoding" in request.headers or _declared(request) > 0


def _declared(request: Request) -> int:
    text = request.headers.get("content-length", "")
    return int(text) if text.isdecimal() else 0
