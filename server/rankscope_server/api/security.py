"""The outermost door: the Host header, who sends a request, and the headers of every answer."""

from __future__ import annotations

from contextlib import suppress
from http.cookies import CookieError, SimpleCookie

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rankscope_server.access import tokens
from rankscope_server.access.door import Credential
from rankscope_server.access.oidc import CALLBACK
from rankscope_server.access.roles import ANYONE, ROLES, Principal, Role, included
from rankscope_server.api import deeds
from rankscope_server.api.failures import unavailable
from rankscope_server.api.proxies import PROXY_USER
from rankscope_server.api.service import Service
from rankscope_server.preflight.hub import TOKEN_PREFIX
from rankscope_server.problems import Problem, answer
from rankscope_server.settings import Settings
from rankscope_server.store.engine import StoreUnavailableError

COOKIE = "rankscope_session"
_SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}
_OWN_SITE = {"same-origin", "none"}  # the latter: typed by the user
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_DEFAULT_PORTS = {"http": 80, "https": 443}
_PORT_DIGITS = 5
# Without a token: that it lives, how to sign in, and the dashboard's own files, which hold no data.
_SESSION = ("/api/v1/session", "/api/v1/session/oidc", CALLBACK)
_OPEN_PATHS = ("/api/v1/health", "/api/v1/ready")
_PRINCIPAL = "rankscope.principal"
_BY_PREFLIGHT: frozenset[Role] = frozenset()
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",  # whatever says nothing else of itself
}


class Guard:
    """ASGI middleware around everything else."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._hosts = allowed_hosts(settings)
        self._named = _named_hosts(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse foreign hosts and unknown senders; add the safety headers."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        send = _with_headers(request, send)
        try:
            self._check_source(request)
            scope[_PRINCIPAL] = await _principal(request)
        except Problem as problem:
            await answer(request, problem)(scope, receive, send)
            return
        except StoreUnavailableError as error:  # who sends is looked up there
            await unavailable(request, error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_source(self, request: Request) -> None:
        host = host_name(request.headers.get("host", ""))
        if self._hosts is not None and host not in self._hosts:
            # A page of another site may have its name point here (DNS rebinding).
            raise Problem(
                421, f"this server does not answer to the name {host[:100]!r}", "Host",
                "name it in --allowed-hosts, or use the address that the server prints",
            )  # fmt: skip
        if request.method not in _SAFE_METHODS and self._is_foreign(request, host):
            # A page of another site may send requests here, though it cannot read the answers.
            raise Problem(
                403, "this request comes from a page of another site", "Origin",
                "use the dashboard of this server",
            )  # fmt: skip

    def _is_foreign(self, request: Request, host: str) -> bool:
        """Return whether a page of another origin sends this: another name, or another port."""
        site = request.headers.get("sec-fetch-site")
        if site is not None:  # the browser compared them itself; pages cannot set this header
            return site not in _OWN_SITE
        origin = request.headers.get("origin")
        if origin is None:  # no browser
            return False
        scheme, _, rest = origin.partition("://")
        name = host_name(rest)
        if name == host or {name, host} <= _LOOPBACK:
            port = _port(request.headers.get("host", "")) or _default_port(request)
            return port is not None and port != (_port(rest) or _DEFAULT_PORTS.get(scheme))
        return name not in self._named  # a proxy that has this name may pass on another one


def _default_port(request: Request) -> int | None:
    """Return the port of a Host header without one; None where a proxy may have taken it off."""
    server = request.scope.get("server")
    port = server[1] if server else None
    return port if port in _DEFAULT_PORTS.values() else None


async def is_still(request: Request, principal: Principal) -> bool:
    """Return whether a request that lasts is still of the same sender: a token may end."""
    try:
        return await _principal(request) == principal
    except Problem:
        return False


def principal_of(request: Request) -> Principal | None:
    """Return who sends a request; None where that was not asked, or is not known."""
    found: Principal | None = request.scope.get(_PRINCIPAL)
    return found


async def _principal(request: Request) -> Principal | None:
    """Return who sends a request, None on paths that are open to all. Raises Problem 401, 429."""
    path = request.url.path
    if not (path.startswith(("/api/", "/v1/")) or path == "/metrics") or path in _OPEN_PATHS:
        return None
    service: Service = request.scope["app"].state.service
    is_open = service.door.is_open
    if is_open is None:
        is_open = await run_in_threadpool(service.door.look)
    if is_open:
        return ANYONE
    credential, user = carried(request.headers), request.scope.get(PROXY_USER)
    if user and (credential is None or credential.is_cookie):
        roles = tuple(role for role in ROLES if role in service.settings.proxy_roles())
        return Principal(name=f"{user} (proxy)", roles=included(roles))
    if credential is None:
        if path in _SESSION:
            return None
        raise Problem(
            401, "this server wants a token", "Authorization",
            "send Authorization: Bearer with a token, or sign in",
        )  # fmt: skip
    found = await _holder(request, service, credential)
    if isinstance(found, Principal):
        return found
    if path in _SESSION:  # who signs in may carry a cookie that has ended
        return None
    raise Problem(401, found, "Authorization", "use another token, or sign in again")


async def _holder(request: Request, service: Service, credential: Credential) -> Principal | str:
    """Return who carries a token or a cookie, or why it is refused. Raises Problem 429."""
    if credential.text.startswith(TOKEN_PREFIX) and not credential.is_cookie:
        live = service.preflights.of_token(credential.text)
        if live is not None:
            return Principal(
                name=f"preflight {live.id}", roles=_BY_PREFLIGHT, project=live.project,
                preflight=live.id,
            )  # fmt: skip
    return await admit(request, service, credential)


async def admit(request: Request, service: Service, credential: Credential) -> Principal | str:
    """Return who is behind a credential, or why it is refused. Raises Problem 429."""
    known = service.door.known(credential)
    if known is not None:
        return known
    address = caller(request)
    is_guess = service.door.is_guess(credential)
    if is_guess:
        service.tries.begin(address)
    found = await run_in_threadpool(service.door.admit, credential)
    if isinstance(found, Principal):
        if is_guess:
            service.tries.was_right(address)
        _note_use(service, found.token_id)
    elif is_guess:
        deed = service.tries.failed(address)
        if deed is not None:
            await deeds.write(service, [deed])
    return found


def _note_use(service: Service, id: str) -> None:
    if id and service.door.is_use_news(id):
        with suppress(StoreUnavailableError):  # not worth a failed request
            service.writer.submit(lambda unit: tokens.used(unit.connection, id, unit.now_ns))


def caller(request: Request) -> str:
    """Return the address from which a request came, IPv4 in IPv6 unpacked."""
    host = request.client.host if request.client is not None else ""
    return host.removeprefix("::ffff:")


def carried(headers: Headers) -> Credential | None:
    """Return the token that a request carries, else its cookie."""
    token = bearer(headers)
    return Credential(token) if token else cookie_of(headers)


def cookie_of(headers: Headers) -> Credential | None:
    """Return the cookie that a request carries."""
    try:
        cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return None
    return Credential(cookie.value, is_cookie=True) if cookie is not None else None


def bearer(headers: Headers) -> str:
    """Return the token that a request carries."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


def allowed_hosts(settings: Settings) -> frozenset[str] | None:
    """Return the names to answer to; None for any, where the server listens to every address.

    With a wildcard address no name is known beforehand; there the token protects.
    """
    more = _named_hosts(settings)
    if settings.host in {"0.0.0.0", "::", ""} and not more:
        return None
    return _LOOPBACK | {settings.host.strip("[]").lower()} | more


def _named_hosts(settings: Settings) -> frozenset[str]:
    names = (name.strip().lower() for name in settings.allowed_hosts.split(","))
    return frozenset(name for name in names if name)


def host_name(header: str) -> str:
    """Return the name of a Host header without its port, in lower case."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def _port(header: str) -> int | None:
    """Return the port of a Host header, None if it has none."""
    digits = header.strip().rpartition("]")[2].partition(":")[2]
    return int(digits) if digits.isdecimal() and len(digits) <= _PORT_DIGITS else None


def _with_headers(request: Request, send: Send) -> Send:
    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
            if message["status"] < 400:
                await deeds.write_of(request)
        await send(message)

    return wrapped
