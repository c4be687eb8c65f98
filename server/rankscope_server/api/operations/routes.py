"""Health, readiness, settings, sign-in, and the counters for Prometheus."""

from __future__ import annotations

import time

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

import rankscope
from rankscope_server.access import tokens
from rankscope_server.access.audit import Deed
from rankscope_server.access.door import Credential
from rankscope_server.access.roles import ANYONE, ROLES, Principal
from rankscope_server.answers import of_row, to_ms
from rankscope_server.api import deeds
from rankscope_server.api.bodies import takes
from rankscope_server.api.operations import readiness
from rankscope_server.api.operations.schema import (
    Clock,
    Health,
    Ready,
    Session,
    SettingsAnswer,
    SettingValue,
)
from rankscope_server.api.replies import documented, send
from rankscope_server.api.run_series import run_series
from rankscope_server.api.security import COOKIE, admit, caller, cookie_of, principal_of
from rankscope_server.api.service import service_of
from rankscope_server.problems import Problem
from rankscope_server.settings import DEFAULT, SETTINGS, Setting, Settings, public_value
from rankscope_server.store.unit import Unit

router = APIRouter(prefix="/api/v1", tags=["operations"])
metrics_router = APIRouter(include_in_schema=False)
MAX_SIGN_IN_BYTES = 4_096


class SignIn(msgspec.Struct):
    """What the sign-in form sends."""

    token: str


@router.get("/health", **documented(Health))
def health(request: Request) -> Response:
    """Say that the server answers."""
    return send(request, Health(status="ok", version=rankscope.__version__))


@router.post("/clock", **documented(Clock))
def clock(request: Request) -> Response:
    """Say what time it is; a collector takes the difference of its clock from that."""
    received_ns = time.time_ns()
    answer = Clock(received_ns=received_ns, sent_ns=time.time_ns())
    return Response(msgspec.json.encode(answer), media_type="application/json")


@router.get("/ready", **documented(Ready))
def ready(request: Request) -> Response:
    """Say that every part can do its work; 503 names those that cannot, and why."""
    parts = readiness.parts_of(service_of(request))
    readiness.check(parts)
    return send(request, Ready(status="ok", version=rankscope.__version__, parts=parts))


@router.get("/settings", **documented(SettingsAnswer))
def settings(request: Request) -> Response:
    """Return the settings in force."""
    chosen = service_of(request).settings
    body = SettingsAnswer(
        settings=[_setting(chosen, each) for each in SETTINGS],
    )
    return send(request, body, body.settings)


@router.get("/session", **documented(Session))
def session(request: Request) -> Response:
    """Say whether a token is wanted, and who this request is from."""
    found = _session(principal_of(request))
    has_issuer = service_of(request).issuer is not None
    return _fresh(send(request, msgspec.structs.replace(found, has_issuer=has_issuer)))


@router.post("/session", openapi_extra=takes(SignIn), **documented(Session))
async def sign_in(request: Request) -> Response:
    """Trade a token for a cookie that no script can read."""
    service, before = service_of(request), principal_of(request)
    given = (await _read_token(request)).strip()
    if before is ANYONE:
        return _fresh(send(request, _session(ANYONE)))
    found = await admit(request, service, Credential(given)) if given else "no token"
    if not isinstance(found, Principal):
        raise Problem(401, found, "token", "use one that `rankscope token list` shows as active")
    now_ns = time.time_ns()
    hours_ns = int(service.settings.session_hours * 3600e9)
    expires_ns = min(now_ns + hours_ns, found.expires_ns or now_ns + hours_ns)
    proof_of = "" if found.token_id else given

    def work(unit: Unit) -> str:
        return tokens.start_session(
            unit.connection, found.token_id, proof_of, unit.now_ns, expires_ns
        )

    cookie = await run_in_threadpool(service.writer.run, work)
    deeds.begin(
        request,
        Deed(action="sign in", who=found.name, project=found.project, address=caller(request)),
    )
    answer = _fresh(send(request, _session(found)))
    answer.set_cookie(
        COOKIE, cookie, httponly=True, samesite="strict", path="/",
        max_age=int((expires_ns - now_ns) / 1e9), secure=request.url.scheme == "https",
    )  # fmt: skip
    return answer


@router.delete("/session", **documented(Session))
async def sign_out(request: Request) -> Response:
    """End the session of the cookie, here and in the browser."""
    service, principal = service_of(request), principal_of(request)
    credential = cookie_of(request.headers)
    if credential is not None and principal is not None and principal is not ANYONE:
        text = credential.text
        await run_in_threadpool(
            service.writer.run, lambda unit: tokens.end_session(unit.connection, text)
        )
        service.door.forget()
        deed = Deed(
            action="sign out", who=principal.name, project=principal.project,
            address=caller(request),
        )  # fmt: skip
        deeds.begin(request, deed)
    is_open = principal is ANYONE
    answer = _fresh(send(request, Session(required=not is_open, signed_in=is_open)))
    answer.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
    return answer


def _setting(chosen: Settings, each: Setting) -> SettingValue:
    source = chosen.sources.get(each.name, DEFAULT)
    return of_row(
        SettingValue, each, value=public_value(chosen, each), source=source.kind,
        where=source.where,
    )  # fmt: skip


async def _read_token(request: Request) -> str:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_SIGN_IN_BYTES:
            raise Problem(413, "too large for a token", "token", 'send {"token": ...}')
    try:
        return msgspec.json.decode(body, type=SignIn).token
    except (msgspec.MsgspecError, ValueError) as error:
        raise Problem(400, "not a sign-in", "token", 'send {"token": ...} as JSON') from error


def _session(principal: Principal | None) -> Session:
    if principal is None:
        return Session(required=True, signed_in=False)
    return Session(
        required=principal is not ANYONE, signed_in=True, name=principal.name,
        roles=[role for role in ROLES if role in principal.roles], project=principal.project,
        expires_ms=to_ms(principal.expires_ns),
    )  # fmt: skip


def _fresh(answer: Response) -> Response:
    answer.headers["Cache-Control"] = "no-store"
    return answer


@metrics_router.get("/metrics")
def metrics(request: Request) -> Response:
    """Return the server's own counters and the series of runs, as text or OpenMetrics."""
    service, accept = service_of(request), ",".join(request.headers.getlist("accept"))
    body, media_type = service.counters.exposition(accept, run_series(service))
    return Response(body, headers={"Content-Type": media_type})
