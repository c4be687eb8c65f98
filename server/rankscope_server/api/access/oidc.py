"""Sign-in of browsers with an issuer: there, and back."""

from __future__ import annotations

import logging
import secrets
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response

from rankscope_server.access import logins, tokens
from rankscope_server.access.audit import Deed
from rankscope_server.access.logins import LOGIN_SECONDS
from rankscope_server.access.oidc import Issuer, Login, OidcError
from rankscope_server.access.roles import ALL_PROJECTS, Principal, included
from rankscope_server.api import deeds
from rankscope_server.api.replies import documented_redirect
from rankscope_server.api.security import COOKIE, caller
from rankscope_server.api.service import Service, service_of
from rankscope_server.problems import Problem, not_found
from rankscope_server.store.unit import Unit

log = logging.getLogger(__name__)
router = APIRouter(prefix="/api/v1", tags=["access"])
BROWSER = "rankscope_sign_in"  # cookie of the browser that began
BEGUN, BEGIN_AGAIN_S = 20, 3.0  # sign-ins of an address at once, then one each so many seconds
_HERE = r"^[A-Za-z0-9][A-Za-z0-9._~/?=&%+:,@!*-]*$"  # a path below the dashboard's root
Word = Annotated[str, Query(max_length=256)]
Code = Annotated[str, Query(max_length=2_048)]


@router.get("/session/oidc", **documented_redirect("To the page of the issuer."))
async def begin(
    request: Request, next: Annotated[str, Query(max_length=500, pattern=_HERE)] = "runs"
) -> Response:
    """Send a browser to the issuer; `next` is the page to come back to."""
    service = service_of(request)
    issuer = _issuer(service)
    wait_s = service.begun.wait_s(caller(request), BEGUN, 1 / BEGIN_AGAIN_S)
    if wait_s:
        raise Problem(
            429, "too many sign-ins begin at this address", None,
            f"try again in {wait_s + 0.5:.0f} s", wait_s,
        )  # fmt: skip
    try:
        url, login = await run_in_threadpool(issuer.begin)
    except OidcError as error:
        return _refused(service, error)
    browser = secrets.token_urlsafe(32)

    def work(unit: Unit) -> None:
        logins.put(unit.connection, login, browser, next, unit.now_ns)

    await run_in_threadpool(service.writer.run, work)
    answer = RedirectResponse(url, 303)
    answer.set_cookie(  # lax: the issuer's page leads back here
        BROWSER, browser, httponly=True, samesite="lax", path=urlsplit(issuer.callback).path,
        max_age=LOGIN_SECONDS, secure=_is_secure(service),
    )  # fmt: skip
    return answer


@router.get("/session/oidc/callback", **documented_redirect("To the dashboard."))
async def come_back(
    request: Request, state: Word = "", code: Code = "", error: Word = ""
) -> Response:
    """Take a browser back from the issuer: signed in, or to the page that says why not."""
    service = service_of(request)
    issuer, address = _issuer(service), caller(request)
    service.tries.begin(address)
    browser = request.cookies.get(BROWSER, "")

    def take(unit: Unit) -> tuple[Login, str] | None:
        return logins.take(unit.connection, state, browser, unit.now_ns)

    try:
        begun = await run_in_threadpool(service.writer.run, take)
        if begun is None:
            raise OidcError("expired", "a sign-in that is over, was used, or is another browser's")
        if error:
            raise OidcError("denied", f"the issuer said {error[:80]!r}")
        principal = await _signed_in(request, issuer, code, begun[0])
    except OidcError as problem:
        deed = service.tries.failed(address)
        if deed is not None:
            await deeds.write(service, [deed])
        return _refused(service, problem)
    service.tries.was_right(address)
    return await _start(request, issuer, principal, begun[1])


async def _signed_in(request: Request, issuer: Issuer, code: str, login: Login) -> Principal:
    """Return who comes back. Raises OidcError, also where no grant fits."""
    service = service_of(request)
    person = await run_in_threadpool(issuer.finish, code, login)
    name = f"{person.name} (oidc)"
    if person.grant is None:
        deed = Deed(
            action="sign in without access", who=name, project=ALL_PROJECTS,
            address=caller(request),
        )  # fmt: skip
        await deeds.write(service, [deed])
        raise OidcError("access", f"no [oidc.access] fits {person.name!r}")
    return Principal(name=name, roles=included(person.grant.roles), project=person.grant.project)


async def _start(request: Request, issuer: Issuer, principal: Principal, path: str) -> Response:
    service = service_of(request)
    seconds = int(service.settings.session_hours * 3600)

    def work(unit: Unit) -> str:
        return tokens.start_session_of_person(
            unit.connection, principal, issuer.mark, unit.now_ns, unit.now_ns + seconds * 10**9
        )

    cookie = await run_in_threadpool(service.writer.run, work)
    deeds.begin(
        request,
        Deed(
            action="sign in", who=principal.name, project=principal.project,
            address=caller(request),
        ),
    )  # fmt: skip
    answer = RedirectResponse(f"{_root(service)}/{path}", 303)
    answer.set_cookie(
        COOKIE, cookie, httponly=True, samesite="strict", path="/", max_age=seconds,
        secure=_is_secure(service),
    )  # fmt: skip
    path_back = urlsplit(issuer.callback).path
    answer.delete_cookie(BROWSER, path=path_back, httponly=True, samesite="lax")
    return answer


def _issuer(service: Service) -> Issuer:
    if service.issuer is None:
        raise not_found("this server has no issuer to sign in with", "sign in with a token", None)
    return service.issuer


def _refused(service: Service, error: OidcError) -> Response:
    log.warning("no sign-in with %s: %s", service.settings.oidc_issuer, error)
    return RedirectResponse(f"{_root(service)}/sign-in?refused={error.why}", 303)


def _root(service: Service) -> str:
    return service.settings.public_url.rstrip("/")


def _is_secure(service: Service) -> bool:
    return service.settings.public_url.startswith("https:")
