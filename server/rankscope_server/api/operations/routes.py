"""Health, readiness, settings, sign-in, and the counters for Prometheus."""

from __future__ import annotations

import time

import msgspec
from fastapi import APIRouter, Request, Response

import rankscope
from rankscope_server.answers import of_row
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
from rankscope_server.api.security import COOKIE, is_token, session_value, signed_in
from rankscope_server.api.service import service_of
from rankscope_server.problems import Problem
from rankscope_server.settings import SETTINGS, public_value

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
        settings=[of_row(SettingValue, each, value=public_value(chosen, each)) for each in SETTINGS]
    )
    return send(request, body, body.settings)


@router.get("/session", **documented(Session))
def session(request: Request) -> Response:
    """Say whether a token is wanted and whether this request carries it."""
    token = service_of(request).settings.token
    carried = not token or signed_in(request.headers, token)
    return send(request, Session(required=bool(token), signed_in=carried))


@router.post("/session", openapi_extra=takes(SignIn), **documented(Session))
async def sign_in(request: Request) -> Response:
    """Trade the token for a cookie that no script can read."""
    token = service_of(request).settings.token
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_SIGN_IN_BYTES:
            raise Problem(413, "too large for a token", "token", 'send {"token": ...}')
    try:
        given = msgspec.json.decode(body, type=SignIn).token
    except (msgspec.MsgspecError, ValueError) as error:
        raise Problem(400, "not a sign-in", "token", 'send {"token": ...} as JSON') from error
    if token and not is_token(given, token):
        raise Problem(401, "this is not the token", "token", "use the value of RANKSCOPE_TOKEN")
    answer = send(request, Session(required=bool(token), signed_in=True))
    if token:
        answer.set_cookie(
            COOKIE, session_value(token), httponly=True, samesite="strict", path="/",
            secure=request.url.scheme == "https",
        )  # fmt: skip
    return answer


@router.delete("/session", **documented(Session))
def sign_out(request: Request) -> Response:
    """Drop the cookie."""
    token = service_of(request).settings.token
    answer = send(request, Session(required=bool(token), signed_in=not token))
    answer.delete_cookie(COOKIE, path="/")
    return answer


@metrics_router.get("/metrics")
def metrics(request: Request) -> Response:
    """Return the server's own counters, as text or OpenMetrics."""
    accept = ",".join(request.headers.getlist("accept"))
    body, media_type = service_of(request).counters.exposition(accept)
    return Response(body, headers={"Content-Type": media_type})
