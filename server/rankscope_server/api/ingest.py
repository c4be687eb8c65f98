"""POST /api/v1/ingest: the hot route, no pydantic on its way."""

from __future__ import annotations

import asyncio
import time

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from rankscope.wire.schema import COMMANDS_HEADER
from rankscope_server.api.operations.schema import IngestAnswer
from rankscope_server.api.replies import documented
from rankscope_server.api.service import Service, service_of
from rankscope_server.ingest.chunks import judge_chunks
from rankscope_server.ingest.envelope import read_envelope, unpack_body
from rankscope_server.ingest.records import judge_records
from rankscope_server.problems import Problem, request_id
from rankscope_server.store.batches import JudgedBatch, Stored, pack_journal, store_batch
from rankscope_server.store.unit import Unit

router = APIRouter(prefix="/api/v1", tags=["ingest"])
_encode = msgspec.json.Encoder().encode


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
    body = await read_body(request, service.settings.max_batch_bytes)
    encoding = request.headers.get("content-encoding", "")
    takes_commands = COMMANDS_HEADER in request.headers
    batch = await run_in_threadpool(judge, service, body, encoding, takes_commands)

    def work(unit: Unit) -> Stored:
        return store_batch(unit, batch)

    def after_commit(stored: Stored) -> None:
        announce(service, batch, stored)

    stored = await asyncio.wrap_future(service.writer.submit(work, after_commit))
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


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the request's body. Raises Problem 413 as soon as it is known to be too large."""
    too_large = Problem(
        413, f"the body is larger than {max_bytes} bytes", "body",
        "send smaller batches, or raise max_batch_bytes of the server",
    )  # fmt: skip
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                raise too_large
            parts.append(part)
    except ClientDisconnect as error:
        raise Problem(400, "the sender went away before the end", "body", "send again") from error
    return b"".join(parts)


def judge(
    service: Service, body: bytes, encoding: str, takes_commands: bool = False
) -> JudgedBatch:
    """Decode and check a body. Raises Problem where it is not a batch at all."""
    try:
        envelope = read_envelope(unpack_body(body, encoding, service.settings.max_unpacked_bytes))
    except Problem:
        service.counters.add("batches_rejected")
        raise
    records, refused = judge_records(envelope.records)
    chunks, refused_chunks = judge_chunks(envelope.chunks)
    return JudgedBatch(
        run_id=envelope.run_id,
        producer=envelope.producer,
        sequence=envelope.sequence,
        host=envelope.host,
        num_bytes=len(body),
        records=records,
        chunks=chunks,
        refused=refused + refused_chunks,
        journal=pack_journal(records),
        takes_commands=takes_commands,
    )


def announce(service: Service, batch: JudgedBatch, stored: Stored) -> None:
    """Tell the analysis and the stream of a batch that is durable."""
    if stored.duplicate:
        return
    service.analysis.feed(batch.run_id, stored.batch_id, batch.records, batch.chunks)
    service.broker.publish(f"run:{batch.run_id}", stored.changed, stored.step or None)
    service.broker.publish("runs", {"runs"}, None)


def count(service: Service, batch: JudgedBatch, stored: Stored, seconds: float) -> None:
    """Add a batch to the counters."""
    counters = service.counters
    counters.add("batches_duplicate" if stored.duplicate else "batches")
    counters.add("ingest_seconds", seconds)
    if not stored.duplicate:
        counters.add("records", len(batch.records))
        counters.add("chunks", len(batch.chunks))
        counters.add("events", sum(judged.chunk.count for judged in batch.chunks))
        counters.add("refused", len(batch.refused))
        counters.add("bytes", batch.num_bytes)
