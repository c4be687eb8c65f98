"""The one form of an error answer: what failed, which field, what to do, and a request id."""

from __future__ import annotations

import logging
import uuid

import msgspec
import sqlalchemy as sa
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from rankscope_server.store.engine import StoreUnavailableError, explain

log = logging.getLogger(__name__)
RETRY_AFTER_SECONDS = 5


class Problem(Exception):
    """An answer other than success, told to the sender in full."""

    def __init__(self, status: int, what: str, field: str | None = None, remedy: str = "") -> None:
        super().__init__(what)
        self.status, self.what, self.field, self.remedy = status, what, field, remedy


class ErrorBody(msgspec.Struct, frozen=True):
    """What failed and what to do about it."""

    what: str
    field: str | None
    remedy: str
    request_id: str


class ErrorAnswer(msgspec.Struct, frozen=True):
    """Every answer with a status from 400 on."""

    error: ErrorBody


def not_found(what: str, remedy: str, field: str | None = None) -> Problem:
    """Return the problem of a thing that does not exist."""
    return Problem(404, what, field, remedy)


def request_id(request: Request) -> str:
    """Return the id of this request: the sender's own where it is sane, else a new one."""
    if "request_id" not in request.scope:
        given = request.headers.get("x-request-id", "")
        sane = 0 < len(given) <= 64 and given.isascii() and given.replace("-", "").isalnum()
        request.scope["request_id"] = given if sane else uuid.uuid4().hex[:16]
    identity: str = request.scope["request_id"]
    return identity


def answer(request: Request, problem: Problem) -> Response:
    """Return the answer that tells a problem."""
    identity = request_id(request)
    body = ErrorAnswer(ErrorBody(problem.what, problem.field, problem.remedy, identity))
    headers = {"X-Request-Id": identity, "Cache-Control": "no-store"}
    if problem.status == 503:
        headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    if problem.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(
        msgspec.json.encode(body), problem.status, headers, media_type="application/json"
    )


def install(app: FastAPI) -> None:
    """Make every failure of the app an answer of this form."""

    @app.exception_handler(Problem)
    async def on_problem(request: Request, error: Problem) -> Response:
        return answer(request, error)

    @app.exception_handler(StoreUnavailableError)
    async def on_store(request: Request, error: StoreUnavailableError) -> Response:
        return answer(request, Problem(503, str(error), None, error.remedy))

    @app.exception_handler(RequestValidationError)
    async def on_validation(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:]) or None
        return answer(request, Problem(422, f"{field}: {first['msg']}", field, "correct it"))

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        remedy = {404: "see /api/v1/openapi.json for the paths", 405: "use another method"}
        problem = Problem(
            error.status_code, str(error.detail), None, remedy.get(error.status_code, "")
        )
        return answer(request, problem)

    @app.exception_handler(sa.exc.DBAPIError)
    async def on_database(request: Request, error: sa.exc.DBAPIError) -> Response:
        reason = explain(error)
        if reason is None:
            return await on_failure(request, error)
        return answer(request, Problem(503, str(reason), None, reason.remedy))

    @app.exception_handler(Exception)
    async def on_failure(request: Request, error: Exception) -> Response:
        log.error("request %s failed", request_id(request), exc_info=error)
        problem = Problem(500, "the server failed on this request", None, "report the request id")
        return answer(request, problem)
