"""What a proxy says of a request: believed of named networks, and of nothing else."""

from __future__ import annotations

import ipaddress
from typing import Any, cast

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from rankscope_server.settings import Settings

PROXY_USER = "rankscope.proxy_user"
_MAX_NAME = 64


class Proxies:
    """ASGI middleware, outermost: takes over the caller's address, the scheme and the user."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._networks = [ipaddress.ip_network(text) for text in settings.proxies()]
        behind: Any = ProxyHeadersMiddleware(cast(Any, app), list(settings.proxies()))
        self._behind: ASGIApp = behind
        self._header = settings.proxy_user_header.lower().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, with what its proxy says if that is a trusted one."""
        if scope["type"] != "http" or not self._is_trusted(scope.get("client")):
            await self._app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == self._header]
        if self._header and len(given) == 1:  # two: one of them may be the caller's own
            scope[PROXY_USER] = _name(given[0].decode("latin-1"))
        await self._behind(scope, receive, send)

    def _is_trusted(self, client: tuple[str, int] | None) -> bool:
        try:
            address = ipaddress.ip_address(client[0] if client else "")
        except ValueError:
            return False
        address = getattr(address, "ipv4_mapped", None) or address
        return any(address in network for network in self._networks)


def _name(text: str) -> str:
    return "".join(sign for sign in text.strip() if sign.isprintable())[:_MAX_NAME]
