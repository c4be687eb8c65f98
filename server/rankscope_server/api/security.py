"""Access: the Host header, the token, and the headers that every answer carries."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rankscope_server.problems import Problem, answer
from rankscope_server.settings import Settings

COOKIE = "rankscope_session"
# Without a token: that it lives, how to sign in, and the dashboard's own files, which hold no data.
_SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}
_OPEN_PATHS = ("/api/v1/health", "/api/v1/ready", "/api/v1/session")


class Guard:
    """ASGI middleware around everything else."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._token = settings.token
        self._hosts = allowed_hosts(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse foreign hosts and missing tokens; add the safety headers."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        send = _with_headers(send)
        problem = self._problem(request)
        if problem is not None:
            await answer(request, problem)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _problem(self, request: Request) -> Problem | None:
        host = host_name(request.headers.get("host", ""))
        if self._hosts is not None and host not in self._hosts:
            # A page of another site may have its name point here (DNS rebinding).
            return Problem(
                421, f"this server does not answer to the name {host[:100]!r}", "Host",
                "name it in --allowed-hosts, or use the address that the server prints",
            )  # fmt: skip
        if request.method not in _SAFE_METHODS and self._is_foreign(request, host):
            # A page of another site may send requests here, though it cannot read the answers.
            return Problem(
                403, "this request comes from a page of another site", "Origin",
                "use the dashboard of this server",
            )  # fmt: skip
        path = request.url.path
        guarded = path.startswith("/api/") or path == "/metrics"
        if (
            not self._token
            or not guarded
            or path in _OPEN_PATHS
            or signed_in(request.headers, self._token)
            or opened_by_preflight(request)
        ):
            return None
        return Problem(
            401, "this server wants a token", "Authorization",
            "send Authorization: Bearer with the value of RANKSCOPE_TOKEN, or sign in",
        )  # fmt: skip

    def _is_foreign(self, request: Request, host: str) -> bool:
        origin = request.headers.get("origin")
        if origin is None:  # no browser
            return False
        name = host_name(origin.partition("://")[2])
        return name != host and (self._hosts is None or name not in self._hosts)


def signed_in(headers: Headers, token: str) -> bool:
    """Return whether a request carries the token, or the cookie that was given for it."""
    given = bearer(headers)
    if given and is_token(given, token):
        return True
    try:
        cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return False
    return cookie is not None and secrets.compare_digest(
        cookie.value.encode(), session_value(token).encode()
    )


def bearer(headers: Headers) -> str:
    """Return the token that a request carries."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


def opened_by_preflight(request: Request) -> bool:
    """Return whether a request carries the token of the one preflight that its path is about."""
    service = getattr(request.scope["app"].state, "service", None)
    given = bearer(request.headers)
    return bool(given and service and service.preflights.opens(given, request.url.path))


def is_token(given: str, token: str) -> bool:
    """Compare in a time that does not depend on how much was right."""
    return secrets.compare_digest(given.encode(), token.encode())


def session_value(token: str) -> str:
    """Return the cookie's value: proves the token without holding it; a new token ends it."""
    return hmac.new(token.encode(), b"rankscope session 1", hashlib.sha256).hexdigest()


def allowed_hosts(settings: Settings) -> frozenset[str] | None:
    """Return the names to answer to; None for any, where the server listens to every address.

    With a wildcard address no name is known beforehand; there the token protects.
    """
    more = {name.strip().lower() for name in settings.allowed_hosts.split(",") if name.strip()}
    if settings.host in {"0.0.0.0", "::", ""} and not more:
        return None
    loopback = {"127.0.0.1", "localhost", "::1"}
    return frozenset(loopback | {settings.host.strip("[]").lower()} | more)


def host_name(header: str) -> str:
    """Return the name of a Host header without its port, in lower case."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def _with_headers(send: Send) -> Send:
    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.setdefault("X-Content-Type-Options", "nosniff")
            headers.setdefault("Referrer-Policy", "no-referrer")
            headers.setdefault("X-Frame-Options", "SAMEORIGIN")
            headers.setdefault(
                "Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'"
            )
        await send(message)

    return wrapped
