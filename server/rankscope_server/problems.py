"""The one form of an error answer: what failed, which field, what to do, and a request id."""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Callable

import msgspec
from fastapi import Request, Response

RETRY_AFTER_SECONDS = 5
_PROCESS, _numbers = secrets.token_hex(4), itertools.count(secrets.randbits(32))


class Problem(Exception):
    """An answer other than success, with its field and its remedy.

    `at` is from and to which character of the field it is wrong, the end excluded.
    """

    def __init__(
        self,
        status: int,
        what: str,
        field: str | None = None,
        remedy: str = "",
        retry_after_s: float = 0.0,
        at: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(what)
        self.status, self.what, self.field, self.remedy = status, what, field, remedy
        self.retry_after_s = retry_after_s or (RETRY_AFTER_SECONDS if status == 503 else 0.0)
        self.at = at


# Paths whose errors have another form: body and content type of one.
FORMS: dict[str, Callable[[Request, Problem], tuple[bytes, str]]] = {}


class ErrorBody(msgspec.Struct, frozen=True):
    """What failed and what to do about it; `at`: from and to which character of the field."""

    what: str
    field: str | None
    remedy: str
    request_id: str
    at: tuple[int, int] | None = None


class ErrorAnswer(msgspec.Struct, frozen=True):
    """Every answer with a status from 400 on."""

    error: ErrorBody


def not_found(what: str, remedy: str, field: str | None = None) -> Problem:
    """Return the problem of a thing that does not exist."""
    return Problem(404, what, field, remedy)


def no_run(run_id: str) -> Problem:
    """Return the problem of a run that does not exist, or that the sender may not see."""
    return not_found(f"no run {run_id[:128]!r}", "see /api/v1/runs", "run")


def no_preflight(id: str) -> Problem:
    """Return the problem of a preflight that does not exist, or that the sender may not see."""
    return not_found(f"no preflight {id[:64]!r}", "see /api/v1/preflight/runs", "id")


def request_id(request: Request) -> str:
    """Return the id of this request: the sender's own where it is sane, else a new one."""
    if "request_id" not in request.scope:
        given = request.headers.get("x-request-id", "")
        sane = 0 < len(given) <= 64 and given.isascii() and given.replace("-", "").isalnum()
        request.scope["request_id"] = given if sane else _new_id()
    identity: str = request.scope["request_id"]
    return identity


def _new_id() -> str:
    """Return an id of this process and a number: to ask the system for chance costs more."""
    return f"{_PROCESS}{next(_numbers) & 0xFFFFFFFF:08x}"


def answer(request: Request, problem: Problem) -> Response:
    """Return a problem as an answer."""
    identity = request_id(request)
    headers = {"X-Request-Id": identity, "Cache-Control": "no-store"}
    if problem.retry_after_s:
        headers["Retry-After"] = str(math.ceil(problem.retry_after_s))
    if problem.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    form = FORMS.get(request.url.path)
    if form is not None:
        data, media_type = form(request, problem)
        return Response(data, problem.status, headers, media_type=media_type)
    body = ErrorAnswer(ErrorBody(problem.what, problem.field, problem.remedy, identity, problem.at))
    return Response(
        msgspec.json.encode(body), problem.status, headers, media_type="application/json"
    )
