"""Tokens and the audit log, for admins of a project or of all."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from fastapi import APIRouter, Path, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from rankscope_server.access import audit, tokens
from rankscope_server.access.roles import ALL_PROJECTS, ANYONE, Principal, Role
from rankscope_server.access.tokens import NewToken
from rankscope_server.answers import of_row
from rankscope_server.api import deeds
from rankscope_server.api.access.rules import sender
from rankscope_server.api.access.schema import (
    Audit,
    AuditRow,
    SessionRow,
    Sessions,
    TokenMade,
    TokenRow,
    Tokens,
)
from rankscope_server.api.bodies import read, takes
from rankscope_server.api.replies import documented, send
from rankscope_server.api.security import carried
from rankscope_server.api.service import Service, service_of
from rankscope_server.problems import Problem
from rankscope_server.store.unit import Unit

router = APIRouter(prefix="/api/v1", tags=["access"])
MAX_ASK_BYTES = 4_096
MAX_AUDIT = 500
_DAY_NS = 86_400 * 10**9
TokenId = Annotated[str, Path(pattern=r"^[0-9a-f]{12}$")]
_SESSION_DIGITS = 16
SessionId = Annotated[str, Path(pattern=rf"^[0-9a-f]{{{_SESSION_DIGITS}}}$")]
Days = Annotated[float, msgspec.Meta(gt=0, le=3_660)]


class AskToken(msgspec.Struct):
    """The token that an admin wants; without `expires_days` it does not end by itself."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    roles: Annotated[list[Role], msgspec.Meta(min_length=1, max_length=4)]
    project: str = ""  # empty: that of the admin's token, else default; * is all
    expires_days: Days | None = None
    bytes_per_second: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0
    events_per_second: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0


class AskRotation(msgspec.Struct):
    """How long the old token works beside the new one."""

    grace_hours: Annotated[float, msgspec.Meta(ge=0, le=24 * 366)] = 24.0


@router.get("/tokens", **documented(Tokens))
def listing(request: Request) -> Response:
    """List tokens: of an admin's own project, or all."""
    with service_of(request).read() as connection:
        found = tokens.rows(connection, sender(request).only_project)
    body = Tokens(tokens=[token_row(row, time.time_ns()) for row in found])
    return send(request, body, body.tokens)


@router.post("/tokens", openapi_extra=takes(AskToken), **documented(TokenMade))
async def create(request: Request) -> Response:
    """Make a token; the answer alone holds it."""
    asked, principal = await read(request, AskToken, MAX_ASK_BYTES), sender(request)
    project = asked.project or principal.sends_to
    if principal.only_project not in (None, project):
        raise Problem(
            403, f"this token is admin of {principal.project} alone", "project",
            "leave the project out, or use a token of all projects",
        )  # fmt: skip
    if principal is ANYONE and ("admin" not in asked.roles or project != ALL_PROJECTS):
        raise Problem(
            409, "the first token shuts the doors: it must be able to open them", "roles",
            "make one with the role admin and the project * first",
        )  # fmt: skip
    days = asked.expires_days
    new = NewToken(
        name=asked.name, roles=tuple(asked.roles), project=project,
        bytes_per_second=asked.bytes_per_second, events_per_second=asked.events_per_second,
        expires_ns=None if days is None else time.time_ns() + int(days * _DAY_NS),
    )  # fmt: skip

    def work(unit: Unit) -> tuple[str, str]:
        return tokens.create(unit.connection, new, principal.name, unit.now_ns)

    service = service_of(request)
    tokens.check(new, time.time_ns())
    made = await run_in_threadpool(service.writer.run, work)
    service.door.shut()
    deeds.add(request, made[0], f"{new.name}: {', '.join(new.roles)}", project)
    return _made(request, made)


@router.post("/tokens/{token}/rotate", openapi_extra=takes(AskRotation), **documented(TokenMade))
async def rotate(request: Request, token: TokenId) -> Response:
    """Make a token like this one, which ends after a while."""
    asked = await read(request, AskRotation, MAX_ASK_BYTES)
    service, principal = service_of(request), sender(request)
    grace_ns = int(asked.grace_hours * 3600e9)

    def work(unit: Unit) -> tuple[str, str]:
        return tokens.rotate(
            unit.connection, token, principal.only_project, principal.name, unit.now_ns, grace_ns
        )

    row = await run_in_threadpool(_row, service, principal, token)
    made = await run_in_threadpool(service.writer.run, work)
    service.door.forget()
    deeds.add(request, made[0], f"in place of {token}", row.project)
    return _made(request, made)


@router.delete("/tokens/{token}", **documented(TokenRow))
async def revoke(request: Request, token: TokenId) -> Response:
    """End a token and the sessions that began with it, at once."""
    service, principal = service_of(request), sender(request)
    row = await run_in_threadpool(_row, service, principal, token)

    def work(unit: Unit) -> sa.Row[Any]:
        tokens.revoke(unit.connection, token, principal.only_project, unit.now_ns)
        return tokens.find(unit.connection, token, principal.only_project)

    ended = await run_in_threadpool(service.writer.run, work)
    service.door.forget()
    deeds.add(request, token, row.name, row.project)
    body = token_row(ended, time.time_ns())
    return send(request, body, [body])


@router.get("/sessions", **documented(Sessions))
def signed_in(request: Request) -> Response:
    """List who is signed in: in an admin's own project, or everywhere."""
    with service_of(request).read() as connection:
        found = tokens.sessions(connection, sender(request).only_project, time.time_ns())
    body = Sessions(sessions=[_session_row(request, row) for row in found])
    return send(request, body, body.sessions)


@router.delete("/sessions/{session}", **documented(SessionRow))
async def sign_out(request: Request, session: SessionId) -> Response:
    """End a session at once, as of a person who has left. Its token works on."""
    service, project = service_of(request), sender(request).only_project

    def work(unit: Unit) -> sa.Row[Any]:
        return tokens.end_named_session(unit.connection, session, project, unit.now_ns)

    ended = await run_in_threadpool(service.writer.run, work)
    service.door.forget()
    deeds.add(request, session, ended.name, ended.project)
    body = _session_row(request, ended)
    return send(request, body, [body])


@router.get("/audit", **documented(Audit))
async def log(
    request: Request,
    before: Annotated[int | None, Query(ge=0, lt=1 << 62)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_AUDIT)] = 100,
) -> Response:
    """Return what was done by whom: in an admin's own project, or everywhere."""
    service, project = service_of(request), sender(request).only_project
    await deeds.write(service, service.tries.rest())

    def look() -> Audit:
        with service.read() as connection:
            rows = audit.rows(connection, project, before, limit)
        shown = [of_row(AuditRow, row) for row in rows]
        return Audit(rows=shown, before=shown[-1].id if len(shown) == limit else None)

    body = await run_in_threadpool(look)
    return send(request, body, body.rows)


def token_row(row: sa.Row[Any], now_ns: int) -> TokenRow:
    """Return a token as it is shown."""
    return TokenRow(**tokens.row_shown(row, now_ns))


def _session_row(request: Request, row: sa.Row[Any]) -> SessionRow:
    own = carried(request.headers)
    return SessionRow(
        id=row.id[:_SESSION_DIGITS], name=row.name, project=row.project,
        by="token" if row.token_id else "issuer" if row.holder else "operator",
        roles=list(tokens.roles_of(row)), created_ms=row.created_ns / 1e6,
        expires_ms=row.expires_ns / 1e6,
        is_own=own is not None and own.is_cookie and tokens.session_id(own.text) == row.id,
    )  # fmt: skip


def _row(service: Service, principal: Principal, id: str) -> sa.Row[Any]:
    with service.read() as connection:
        return tokens.find(connection, id, principal.only_project)


def _made(request: Request, made: tuple[str, str]) -> Response:
    answer = send(request, TokenMade(id=made[0], token=made[1]))
    answer.headers["Cache-Control"] = "no-store"
    return answer
