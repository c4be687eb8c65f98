"""Routes of OpenTelemetry's protocol over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from rankscope_server.api.access.rules import sender
from rankscope_server.api.access.sending import check_sender
from rankscope_server.api.bodies import read_body
from rankscope_server.api.service import Service, service_of
from rankscope_server.batch_log.interface import Origin
from rankscope_server.otlp import bodies
from rankscope_server.otlp.bodies import JSON, PROTOBUF, Signal
from rankscope_server.otlp.parts import Resource, Said, split
from rankscope_server.problems import FORMS, Problem, request_id

router = APIRouter(prefix="/v1", tags=["OpenTelemetry"])
_SCOPES: dict[Signal, tuple[str, str]] = {
    "traces": ("scope_spans", "spans"), "logs": ("scope_logs", "log_records"),
    "metrics": ("scope_metrics", "metrics"),
}  # fmt: skip
_ITEMS: dict[Signal, str] = {"traces": "spans", "logs": "log records", "metrics": "data points"}
_CONTENT = {PROTOBUF: {"schema": {"type": "string", "format": "binary"}}, JSON: {}}
_FAILED = {
    "description": "A google.rpc.Status with its message.",
    "content": {PROTOBUF: {}, JSON: {}},
}


def _declared(word: str) -> dict[str, Any]:
    """Return what a route declares to OpenAPI."""
    return {
        "summary": f"Store {word} of OpenTelemetry",
        "openapi_extra": {
            "requestBody": {
                "description": f"One `Export{word}ServiceRequest`, optionally packed by gzip.",
                "required": True, "content": _CONTENT,
            }
        },
        "responses": {
            200: {
                "description": f"`Export{word}ServiceResponse`: what was not stored, and why.",
                "content": {PROTOBUF: {}, JSON: {}},
            },
            "4XX": _FAILED, "501": _FAILED, "503": _FAILED,
        },
        "response_class": Response,
    }  # fmt: skip


@router.post("/traces", **_declared("Trace"))
async def traces(request: Request) -> Response:
    """Take spans; answer once they are stored."""
    return await _take(request, "traces")


@router.post("/logs", **_declared("Logs"))
async def logs(request: Request) -> Response:
    """Take log records; answer once they are stored."""
    return await _take(request, "logs")


@router.post("/metrics", **_declared("Metrics"))
async def metrics(request: Request) -> Response:
    """Take data points; answer once they are stored."""
    return await _take(request, "metrics")


async def _take(request: Request, signal: Signal) -> Response:
    service = service_of(request)
    service.event_quota.check(sender(request))
    kind = request.headers.get("content-type", "")
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isdecimal() else service.settings.max_batch_bytes
    with service.intake.under_way(min(size, service.settings.max_batch_bytes)) as waiting:
        body = await read_body(request, service.settings.max_batch_bytes)
        service.intake.received(waiting)
        said = Said()
        found = await run_in_threadpool(_parts_of, request, signal, body, said)
        await _store(request, service, signal, body, found, said)
    text = said.text(_ITEMS[signal])
    answer, media_type = bodies.answer_of(signal, said.num_refused, text, kind)
    return Response(answer, 200, {"X-Request-Id": request_id(request)}, media_type=media_type)


def _parts_of(
    request: Request, signal: Signal, body: bytes, said: Said
) -> dict[tuple[str, str], list[Resource]]:
    """Return what a body holds, by run and host. Raises Problem."""
    headers, settings = request.headers, service_of(request).settings
    found = bodies.resources_of(
        signal, body, headers.get("content-encoding", ""), headers.get("content-type", ""),
        settings.max_unpacked_bytes,
    )  # fmt: skip
    scopes, items = _SCOPES[signal]
    try:
        return split(found, scopes, said, lambda scope: len(getattr(scope, items)))
    except ValueError as error:
        raise Problem(413, str(error), "body", "send fewer resources in a request") from error


async def _store(
    request: Request, service: Service, signal: Signal, body: bytes,
    found: dict[tuple[str, str], list[Resource]], said: Said,
) -> None:  # fmt: skip
    """Store the parts of a request, all at once; the first failure is the answer."""
    for run_id in {run_id for run_id, _ in found}:
        await check_sender(request, run_id)
    origin = Origin(sender(request).only_project)
    done = await asyncio.gather(
        *(service.otlp.take(signal, where, those, body, origin) for where, those in found.items()),
        return_exceptions=True,
    )
    for one in done:  # what was stored of it is not stored again when it is sent again
        if isinstance(one, BaseException):
            raise one
        part, heads = one
        said.refused += part.refused
        said.notes += part.notes
        for head in heads:
            service.event_quota.count(sender(request), head.num_records + head.num_events)


def _status(request: Request, problem: Problem) -> tuple[bytes, str]:
    return bodies.status_of(problem, request.headers.get("content-type", ""))


FORMS.update({f"/v1/{signal}": _status for signal in _SCOPES})
