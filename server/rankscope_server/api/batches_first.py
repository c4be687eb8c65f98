"""Batches go straight to their endpoint: a thousand ranks send a hundred a second.

The router, the dependencies and the exception handlers of the framework take longer with a batch
than this server takes to unpack it. What is declared of the route (its rule, its description) stays
with the route, which answers everything else at this address.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rankscope_server.api.access.rules import authorize
from rankscope_server.api.failures import response_to
from rankscope_server.api.ingest import ingest, router


class BatchesFirst:
    """ASGI middleware behind all that guards: it replaces the router, not them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        (self._route,) = (
            route for route in router.routes
            if isinstance(route, Route) and route.endpoint is ingest
        )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Store a batch and answer; pass on what is none."""
        is_batch = (
            scope["type"] == "http"
            and scope["method"] == "POST"
            and scope["path"] == self._route.path
        )
        if not is_batch:
            await self._app(scope, receive, send)
            return
        scope["route"], scope["path_params"] = self._route, {}
        request = Request(scope, receive)
        try:
            await authorize(request)
            response = await ingest(request)
        except Exception as error:
            known = response_to(request, error)
            if known is None:  # a bug: logged and answered where all of them are
                raise
            response = known
        await response(scope, receive, send)
