"""The agent of a run: what it reports of itself, and what is asked of it."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
from fastapi import APIRouter, Path, Query, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from rankscope.wire.schema import MAX_PROFILE_STEPS, MAX_RANK, MAX_TRACE_BYTES, AskedKind
from rankscope_server.access.roles import ANYONE, OPERATOR
from rankscope_server.api import deeds
from rankscope_server.api.access.rules import sender
from rankscope_server.api.bodies import field_of, read_body, takes
from rankscope_server.api.commands import agent as agent_queries
from rankscope_server.api.commands import queries as command_queries
from rankscope_server.api.commands.schema import AgentAnswer, CommandRow, Commands, PartAnswer
from rankscope_server.api.replies import documented, documented_as, send
from rankscope_server.api.runs.queries import reading, run_row
from rankscope_server.api.service import service_of
from rankscope_server.problems import Problem, not_found, request_id
from rankscope_server.store.commands import Asked, CommandRefusedError, create, store_part
from rankscope_server.store.locks import of_run
from rankscope_server.store.unit import Unit

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["agent"])
MAX_ASK_BYTES = 1 << 20
MAX_PART_BYTES = 4 << 20
CommandId = Annotated[int, Path(ge=0, lt=1 << 62)]
Rank = Annotated[int, Path(ge=0, le=MAX_RANK)]


class Ask(msgspec.Struct):
    """What a person asks of ranks; without ranks all, of a profile the first of each node."""

    kind: AskedKind
    ranks: list[Annotated[int, msgspec.Meta(ge=0, le=MAX_RANK)]] = []
    num_steps: Annotated[int, msgspec.Meta(ge=1, le=MAX_PROFILE_STEPS)] = 3


_PART = {
    "required": True,
    "content": {"application/gzip": {"schema": {"type": "string", "format": "binary"}}},
}


@router.get("/agent", **documented(AgentAnswer))
def agent(request: Request, run: str) -> Response:
    """Return what the agent reports of itself: sources, what it skipped, what it lost."""
    with reading(request, run) as (connection, row):
        body = agent_queries.agent(connection, row)
    return send(request, body, body.sources)


@router.get("/commands", **documented(Commands))
def commands(request: Request, run: str) -> Response:
    """List what was asked of the ranks, newest first."""
    with reading(request, run) as (connection, _):
        body = command_queries.commands(connection, run, time.time_ns())
    return send(request, body, body.commands)


@router.get("/commands/{id}", **documented(CommandRow))
def command(request: Request, run: str, id: CommandId) -> Response:
    """Return one command."""
    with service_of(request).read() as connection:
        body = command_queries.command(connection, run, id, time.time_ns())
    return send(request, body, [body])


@router.post("/commands", openapi_extra=takes(Ask), **documented(CommandRow))
async def ask(request: Request, run: str) -> Response:
    """Ask ranks for stacks or a profile, or switch their recording off or on."""
    body = await read_body(request, MAX_ASK_BYTES)
    try:
        asked = msgspec.json.decode(body, type=Ask)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Problem(
            422, f"not a command: {str(error)[:300]}", field_of(error),
            'send {"kind": "stacks", "profile", "agent_off" or "agent_on", "ranks": [0, 1]}',
        ) from error  # fmt: skip
    return await run_in_threadpool(_ask, request, run, asked)


def _ask(request: Request, run: str, asked: Ask) -> Response:
    service = service_of(request)
    with service.read() as connection:
        run_row(connection, run)
    by = "user" if sender(request) in (ANYONE, OPERATOR) else sender(request).name
    wanted = Asked(asked.kind, sorted(set(asked.ranks)), asked.num_steps, by)
    made = service.writer.run(lambda unit: _create(unit, run, wanted), lock=of_run(run))
    if isinstance(made, CommandRefusedError):
        raise Problem(409, str(made), made.field, made.remedy)
    ranks = ", ".join(map(str, wanted.ranks)) or "all"
    deeds.add(request, detail=f"{wanted.kind}, ranks {ranks}")
    service.broker.publish(f"run:{run}", {"commands"}, None)
    with service.read() as connection:
        body = command_queries.command(connection, run, made, time.time_ns())
    return send(request, body, [body])


def _create(unit: Unit, run: str, wanted: Asked) -> int | CommandRefusedError:
    try:
        return create(unit, run, wanted)
    except CommandRefusedError as error:  # an answer, no failure of the store
        return error


@router.post(
    "/commands/{id}/ranks/{rank}/trace",
    openapi_extra={"requestBody": _PART},
    **documented(PartAnswer),
)
async def put_trace(
    request: Request,
    run: str,
    id: CommandId,
    rank: Rank,
    offset: Annotated[int, Query(ge=0, le=MAX_TRACE_BYTES)],
    total: Annotated[int, Query(ge=1, le=MAX_TRACE_BYTES)],
) -> Response:
    """Take a part of a trace that this server asked for, in order from offset 0."""
    data = await read_body(request, MAX_PART_BYTES)
    if not data or offset + len(data) > total:
        raise Problem(422, "the part is outside of the trace", "offset", "send it as it is")
    received = await run_in_threadpool(
        lambda: service_of(request).writer.run(
            lambda unit: store_part(unit, run, id, rank, offset, total, data), lock=of_run(run)
        )
    )
    if received is None:
        raise not_found("this trace was not asked for", f"see /api/v1/runs/{run}/commands", "id")
    return send(request, PartAnswer(received_bytes=received))


@router.get(
    "/commands/{id}/ranks/{rank}/trace",
    response_class=StreamingResponse,
    **documented_as("application/gzip", "The trace."),
)
def trace(request: Request, run: str, id: CommandId, rank: Rank) -> Response:
    """Return a trace as gzipped Chrome JSON, for Perfetto."""
    service = service_of(request)
    with service.read() as connection:
        command_queries.command(connection, run, id, time.time_ns())
        size = command_queries.trace_size(connection, id, rank)
    if size is None:
        raise not_found(
            f"no trace of rank {rank}", "it has not arrived yet, or newer ones took its place"
        )
    headers = {
        "Content-Disposition": f'attachment; filename="{run}-rank{rank}-{id}.trace.json.gz"',
        "Content-Length": str(size),
        "Content-Encoding": "identity",  # it is packed already
        "Cache-Control": "no-store",
        "X-Request-Id": request_id(request),
    }
    parts = command_queries.trace_parts(service.reader, id, rank)
    return StreamingResponse(parts, 200, headers, media_type="application/gzip")
