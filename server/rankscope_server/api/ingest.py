"""POST /api/v1/ingest: the hot route, no pydantic on its way."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from rankscope.wire.schema import (
    CLOCK_HEADER,
    COMMANDS_HEADER,
    HELD_HEADER,
    Command,
    Watermark,
)
from rankscope_server.answers import Schema
from rankscope_server.api.access.rules import sender
from rankscope_server.api.access.sending import check_sender
from rankscope_server.api.bodies import are_vitals, read_body
from rankscope_server.api.replies import documented
from rankscope_server.api.service import Service, service_of
from rankscope_server.batch_log.interface import Appended, Head, Origin
from rankscope_server.ingest.envelope import MAX_SEQUENCE, NAME, RUN_ID
from rankscope_server.ingest.records import Refused
from rankscope_server.problems import Problem, request_id
from rankscope_server.store.engine import StoreUnavailableError
from rankscope_server.store.watermarks import watermark_of

router = APIRouter(prefix="/api/v1", tags=["ingest"])
_encode = msgspec.json.Encoder().encode
_MAX_DIGITS = 20  # of a time in ns


class IngestAnswer(Schema, frozen=True):
    """What was accepted of a batch."""

    accepted_records: int
    accepted_chunks: int
    duplicate: bool
    refused: list[Refused] = msgspec.field(default_factory=list)
    # for the ranks whose states the batch brought; only to a sender that says it takes them
    commands: list[Command] = msgspec.field(default_factory=list)
    # how far the producer's batches are durable; only to a sender that says which it holds
    watermark: Watermark | None = None


class WatermarkAnswer(Schema, frozen=True):
    """How far the batches of a producer are durable."""

    watermark: Watermark


_BODY = {
    "description": "One `rankscope.wire.schema.Batch`, optionally with Content-Encoding zstd.",
    "required": True,
    "content": {"application/msgpack": {"schema": {"type": "string", "format": "binary"}}},
}


@router.post(
    "/ingest",
    summary="Store one batch",
    openapi_extra={"requestBody": _BODY},
    **documented(IngestAnswer),
)
async def ingest(request: Request) -> Response:
    """Take a msgpack `Batch`; answer after it outlives this server."""
    service, started = service_of(request), time.perf_counter()
    _check_quota(request, service)
    with service.intake.under_way(_length(request, service)) as waiting:
        body = await read_body(request, service.settings.max_batch_bytes)
        service.intake.received(waiting)
        head, appended = await take(request, service, body)
    if not appended.duplicate:
        service.event_quota.count(sender(request), head.num_records + head.num_events)
    service.counters.seconds.inc(time.perf_counter() - started)
    answer = IngestAnswer(
        accepted_records=0 if appended.duplicate else head.num_records,
        accepted_chunks=0 if appended.duplicate else head.num_chunks,
        duplicate=appended.duplicate,
        refused=appended.refused,
        commands=appended.commands,
        watermark=await _watermark(request, service, head, appended),
    )
    headers = {"X-Request-Id": request_id(request)}
    return Response(_encode(answer), 200, headers, media_type="application/json")


@router.get(
    "/ingest/watermark",
    summary="How far the batches of a producer are durable",
    **documented(WatermarkAnswer),
)
async def watermark(
    request: Request,
    run_id: Annotated[str, Query(pattern=f"^{RUN_ID}$")],
    producer: Annotated[str, Query(pattern=f"^{NAME}$")],
    held_from: Annotated[int, Query(ge=1, lt=MAX_SEQUENCE)],
) -> Response:
    """Answer a collector that holds batches from `held_from` on and has none to send."""
    service = service_of(request)
    await check_sender(request, run_id)
    found = await _read_watermark(service, run_id, producer, held_from)
    return Response(_encode(WatermarkAnswer(watermark=found)), media_type="application/json")


async def _watermark(
    request: Request, service: Service, head: Head, appended: Appended
) -> Watermark | None:
    """Return how far the producer of a batch has come; of most it holds this one alone."""
    held = request.headers.get(HELD_HEADER, "")
    if not held.isdecimal() or len(held) > _MAX_DIGITS:
        return None
    if appended.is_durable and int(held) >= head.sequence:
        return Watermark(durable=head.sequence, newest=head.sequence)
    held_from = min(int(held), head.sequence)
    return await _read_watermark(service, head.run_id, head.producer, held_from)


async def _read_watermark(
    service: Service, run_id: str, producer: str, held_from: int
) -> Watermark:
    def read() -> Watermark:
        with service.read() as connection:
            return watermark_of(connection, run_id, producer, held_from)

    return await run_in_threadpool(read)


def _check_quota(request: Request, service: Service) -> None:
    """Refuse a batch of a token that sent too many events. Raises Problem 429."""
    try:
        service.event_quota.check(sender(request))
    except Problem:
        service.intake.put_off(by_quota=True)  # its ranks are not silent
        raise


def _length(request: Request, service: Service) -> int:
    """Return the bytes that a request announces; as many as it may have where it does not."""
    declared, most = request.headers.get("content-length", ""), service.settings.max_batch_bytes
    return min(int(declared), most) if declared.isdigit() else most


async def take(request: Request, service: Service, body: bytes) -> tuple[Head, Appended]:
    """Accept a body as a batch; return once it outlives this server. Raises Problem."""
    encoding = request.headers.get("content-encoding", "")
    takes_commands, is_urgent = COMMANDS_HEADER in request.headers, are_vitals(request)
    try:
        batch = await service.log.read(
            body, encoding, takes_commands=takes_commands, is_urgent=is_urgent
        )
    except Problem:
        service.counters.rejected.inc()
        raise
    head = batch.head
    await check_sender(request, head.run_id)
    clock = request.headers.get(CLOCK_HEADER, "")
    clock_ns = int(clock) if clock.isdecimal() and len(clock) < _MAX_DIGITS else 0
    try:
        origin = Origin(sender(request).only_project, clock_ns, is_urgent)
        appended = await service.log.append(batch, origin)
    except StoreUnavailableError as error:
        if error.cause == "behind":
            service.intake.put_off()
        raise
    except Problem as problem:
        if problem.status == 410:
            service.counters.rejected.inc()
        raise
    if clock_ns:  # for how long it has waited at its collector, which sent what its clock shows
        service.intake.waited(head.run_id, head.producer, (clock_ns - head.sent_ns) / 1e9)
    return head, appended
