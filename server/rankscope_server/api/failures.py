"""Turns every failure of the app into the one form of an error answer."""

from __future__ import annotations

import logging

import sqlalchemy as sa
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from rankscope_server.api.service import service_of
from rankscope_server.problems import Problem, answer, request_id
from rankscope_server.store.engine import StoreUnavailableError, explain

log = logging.getLogger(__name__)


def unavailable(request: Request, error: StoreUnavailableError) -> Response:
    """Return the answer to a request that the store cannot serve now."""
    service_of(request).counters.unavailable.labels(error.cause).inc()
    return answer(request, Problem(503, str(error), None, error.remedy))


def response_to(request: Request, error: Exception) -> Response | None:
    """Return the answer to a request that failed for a known reason; None for a bug of ours."""
    if isinstance(error, Problem):
        return answer(request, error)
    known = isinstance(error, StoreUnavailableError | sa.exc.DBAPIError)
    reason = explain(error) if known else None
    return None if reason is None else unavailable(request, reason)


def install(app: FastAPI) -> None:
    """Make every failure of the app an answer of this form."""

    @app.exception_handler(Problem)
    @app.exception_handler(StoreUnavailableError)
    @app.exception_handler(sa.exc.DBAPIError)
    async def on_known(request: Request, error: Exception) -> Response:
        known = response_to(request, error)
        return known if known is not None else await on_failure(request, error)

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

    @app.exception_handler(Exception)
    async def on_failure(request: Request, error: Exception) -> Response:
        log.error("request %s failed", request_id(request), exc_info=error)
        problem = Problem(500, "the server failed on this request", None, "report the request id")
        return answer(request, problem)
