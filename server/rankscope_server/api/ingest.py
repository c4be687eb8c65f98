"""POST /api/v1/ingest: the hot route, no pydantic on its way."""

from __future__ import annotations

import asyncio
import time

import msgspec
from fastapi import APIRouter, Request, Response

from rankscope.wire.schema import CLOCK_HEADER, COMMANDS_HEADER, Command
from rankscope_server.answers import Schema
from rankscope_server.api.access.rules import sender
from rankscope_server.api.access.sending import check_sender, claim
from rankscope_server.api.bodies import are_vitals, read_body
from rankscope_server.api.replies import documented
from rankscope_server.api.service import Service, service_of
from rankscope_server.ingest.batch import ValidatedBatch
from rankscope_server.ingest.records import Refused
from rankscope_server.problems import Problem, request_id
from rankscope_server.store.batches import Stored, store_batch
from rankscope_server.store.deletion import Deleted, deletion_in, gone
from rankscope_server.store.engine import StoreUnavailableError
from rankscope_server.store.locks import of_run
from rankscope_server.store.unit import Unit

router = APIRouter(prefix="/api/v1", tags=["ingest"])
_encode = msgspec.json.Encoder().encode
_MAX_DIGITS = 20  # of a time in ns


class IngestAnswer(Schema, frozen=True):
    """What was stored of a batch."""

    accepted_records: int
    accepted_chunks: int
    duplicate: bool
    refused: list[Refused] = msgspec.field(default_factory=list)
    # for the ranks whose states the batch brought; only to a sender that says it takes them
    commands: list[Command] = msgspec.field(default_factory=list)


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
    """Store a msgpack `Batch`; answer after it is durable."""
    service, started = service_of(request), time.perf_counter()
    _check_quota(request, service)
    with service.intake.under_way(_length(request, service)) as waiting:
        body = await read_body(request, service.settings.max_batch_bytes)
        service.intake.received(waiting)
        batch, stored = await store(request, service, body)
    _note_wait(request, service, batch)
    if not stored.duplicate:
        service.event_quota.count(sender(request), len(batch.records) + num_events(batch))
    count(service, batch, stored, time.perf_counter() - started)
    answer = IngestAnswer(
        accepted_records=0 if stored.duplicate else len(batch.records),
        accepted_chunks=0 if stored.duplicate else len(batch.chunks),
        duplicate=stored.duplicate,
        refused=batch.refused,
        commands=stored.commands,
    )
    headers = {"X-Request-Id": request_id(request)}
    return Response(_encode(answer), 200, headers, media_type="application/json")


def _check_quota(request: Request, service: Service) -> None:
    """Refuse a batch of a token that sent too many events. Raises Problem 429."""
    try:
        service.event_quota.check(sender(request))
    except Problem:
        service.intake.put_off(by_quota=True)  # its ranks are not silent
        raise


def _note_wait(request: Request, service: Service, batch: ValidatedBatch) -> None:
    """Note for how long a batch has waited at its collector, which sent what its clock shows."""
    clock = request.headers.get(CLOCK_HEADER, "")
    if clock.isdecimal() and len(clock) < _MAX_DIGITS:
        waited_ns = int(clock) - batch.sent_ns
        service.intake.waited(batch.run_id, batch.producer, waited_ns / 1e9)


def _length(request: Request, service: Service) -> int:
    """Return the bytes that a request announces; as many as it may have where it does not."""
    declared, most = request.headers.get("content-length", ""), service.settings.max_batch_bytes
    return min(int(declared), most) if declared.isdigit() else most


async def store(request: Request, service: Service, body: bytes) -> tuple[ValidatedBatch, Stored]:
    """Validate a body and store it; return once it is durable. Raises Problem."""
    encoding = request.headers.get("content-encoding", "")
    takes_commands, is_urgent = COMMANDS_HEADER in request.headers, are_vitals(request)
    try:
        batch, journal = await asyncio.wrap_future(
            service.validator.submit(
                body, encoding, takes_commands=takes_commands, is_urgent=is_urgent
            )
        )
    except Problem:
        service.counters.rejected.inc()
        raise
    await check_sender(request, batch.run_id)

    def work(unit: Unit) -> Stored | Deleted:
        if (deleted := deletion_in(unit, batch.run_id)) is not None:
            return deleted
        claim(request, unit, batch.run_id)
        return store_batch(unit, batch, journal)

    def after_commit(stored: Stored | Deleted) -> None:
        if isinstance(stored, Stored):
            announce(service, batch, stored)

    lock = of_run(batch.run_id)
    try:
        done = service.writer.submit(
            work, after_commit, lock=lock, is_urgent=is_urgent,
            announce=lambda unit: unit.run(batch.run_id).want(batch),
        )  # fmt: skip
    except StoreUnavailableError as error:
        if error.cause == "behind":
            service.intake.put_off()
        raise
    stored = await asyncio.wrap_future(done)
    if isinstance(stored, Deleted):
        service.counters.rejected.inc()
        raise gone(stored)
    return batch, stored


def num_events(batch: ValidatedBatch) -> int:
    """Return how many events the chunks of a batch have."""
    return sum(part.chunk.count for part in batch.chunks)


def announce(service: Service, batch: ValidatedBatch, stored: Stored) -> None:
    """Hand a durable batch to the analysis, and hint at it on the stream."""
    if stored.duplicate:
        return
    service.analysis.feed(batch.run_id, stored.batch_id, batch.records, batch.chunks)
    service.broker.publish(f"run:{batch.run_id}", stored.changed, stored.step or None)
    service.broker.publish("runs", {"runs"}, None)


def count(service: Service, batch: ValidatedBatch, stored: Stored, seconds: float) -> None:
    """Add a batch to the counters."""
    counters = service.counters
    (counters.duplicates if stored.duplicate else counters.batches).inc()
    counters.seconds.inc(seconds)
    if not stored.duplicate:
        counters.records.inc(len(batch.records))
        counters.chunks.inc(len(batch.chunks))
        counters.events.inc(num_events(batch))
        counters.refused.inc(len(batch.refused))
        counters.bytes.inc(batch.num_bytes)
