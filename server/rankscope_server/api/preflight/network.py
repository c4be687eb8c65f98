"""The server's own network checks: who calls, what time it is, whether the caller can be reached.

Never a port scanning service: `preflight/dialling.py` and `preflight/targets.py` hold the rules.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request, Response
from starlette.responses import StreamingResponse

from rankscope_server.api.bodies import read, takes
from rankscope_server.api.preflight.routes import (
    NodeName,
    Port,
    is_proxied,
    member_of,
)
from rankscope_server.api.preflight.schema import BlobTaken, NetTime, Whoami
from rankscope_server.api.replies import documented, documented_as, send
from rankscope_server.api.security import bearer, caller
from rankscope_server.api.service import service_of
from rankscope_server.preflight.dialling import Dialled, Target, resolved
from rankscope_server.preflight.live import Live, Member
from rankscope_server.problems import Problem, not_found

router = APIRouter(prefix="/api/v1/net", tags=["net"])
MAX_ASK_BYTES = 4_096
MAX_BLOB_BYTES = 16 << 20
BLOB_SIZE, BLOB_PER_S = 128 << 20, 4 << 20  # bytes of one address: a burst, then 34 Mbit/s
_PART_BYTES = 64 << 10
Bytes = Annotated[int, Query(ge=1, le=MAX_BLOB_BYTES)]


class Dialback(msgspec.Struct):
    """The caller asks to be dialled at the address it comes from."""

    node: NodeName  # as it joined
    port: Port


class CheckNode(msgspec.Struct):
    """A node of a preflight is to be dialled by its name."""

    run: str
    node: NodeName
    port: Port


@router.get("/whoami", **documented(Whoami))
def whoami(request: Request) -> Response:
    """Return the address that the server sees: another than the caller's own is NAT."""
    return _fresh(send(request, Whoami(address=caller(request), is_proxied=is_proxied(request))))


@router.get("/time", **documented(NetTime))
def clock(request: Request) -> Response:
    """Return the server's wall clock."""
    received_ns = time.time_ns()
    return _fresh(send(request, NetTime(received_ns=received_ns, sent_ns=time.time_ns())))


@router.post("/dialback", openapi_extra=takes(Dialback), **documented(Dialled))
async def dialback(request: Request) -> Response:
    """Dial the caller's own address, on a port that it declared."""
    service = service_of(request)
    live = _live(request)
    asked = await read(request, Dialback, MAX_ASK_BYTES)
    if is_proxied(request):
        raise Problem(
            403, "a proxy is between: your own address is not known", "X-Forwarded-For",
            "ask the server directly, without the proxy",
        )  # fmt: skip
    member = _member(live, asked.node)
    if member.proven != caller(request):
        raise Problem(403, f"{asked.node} joined from another address", "node", "name yourself")
    target = service.dialler.target(member, member.proven, asked.port)
    return _fresh(send(request, await service.dialler.dial(live, target)))


@router.post("/check", openapi_extra=takes(CheckNode), **documented(Dialled))
async def check(request: Request) -> Response:
    """Resolve a node's name once, and dial the address if it is the node's."""
    asked = await read(request, CheckNode, MAX_ASK_BYTES)
    live = member_of(request, asked.run)
    return _fresh(send(request, await call_by_name(request, live, asked.node, asked.port)))


@router.get(
    "/blob",
    response_class=StreamingResponse,
    **documented_as("application/octet-stream", "So many random bytes."),
)
def get_blob(request: Request, bytes: Bytes = 1 << 20) -> Response:
    """Send so many random bytes."""
    _spend_bytes(request, bytes)
    headers = {
        "Content-Length": str(bytes), "Content-Encoding": "identity", "Cache-Control": "no-store",
    }  # fmt: skip
    return StreamingResponse(_parts(bytes), 200, headers, media_type="application/octet-stream")


@router.put(
    "/blob",
    openapi_extra={
        "requestBody": {
            "content": {"application/octet-stream": {"schema": {"type": "string"}}},
        }
    },
    **documented(BlobTaken),
)
async def put_blob(request: Request, bytes: Bytes = 1 << 20) -> Response:
    """Take so many bytes, forget them, and say how fast they came."""
    _spend_bytes(request, bytes)
    size, started = 0, 0.0
    async for part in request.stream():
        started = started or time.monotonic()
        size += len(part)
        if size > bytes:
            raise Problem(413, f"more than the {bytes} bytes announced", "bytes", "announce them")
    elapsed_s = max(time.monotonic() - started, 1e-6) if started else 0.0
    speed = size * 8 / elapsed_s / 1e6 if elapsed_s else 0.0
    body = BlobTaken(received_bytes=size, elapsed_ms=elapsed_s * 1e3, mbit_per_s=round(speed, 3))
    return _fresh(send(request, body))


async def call_by_name(request: Request, live: Live, node: str, port: int) -> Dialled:
    """Resolve the name of a member once, and dial the address if it is the member's own."""
    dialler = service_of(request).dialler
    member = _member(live, node)
    dialler.spend(live, member.node)  # a look-up is work, too
    target = await _by_name(request, member, port)
    if target is None:
        return Dialled(
            outcome="unresolved", address="", port=port, elapsed_ms=0.0,
            why="the server does not resolve this name to an address of that node",
        )  # fmt: skip
    return await dialler.dial(live, target)


def _live(request: Request) -> Live:
    live = service_of(request).preflights.of_token(bearer(request.headers))
    if live is None:
        raise Problem(
            403, "the server dials only for the members of a preflight", "Authorization",
            "send Authorization: Bearer with the token of one that is under way",
        )  # fmt: skip
    return live


def _member(live: Live, node: str) -> Member:
    member = live.members.get(node)
    if member is None:
        raise not_found(f"{node} has not joined", "POST its join first", "node")
    return member


async def _by_name(request: Request, member: Member, port: int) -> Target | None:
    """Return the first address of a node's name that is the node's own; None if there is none."""
    own = (member.proven, *member.addresses)
    for address in await resolved(member.node):
        if address in own:
            return service_of(request).dialler.target(member, address, port)
    return None


def _spend_bytes(request: Request, size: int) -> None:
    limits = service_of(request).preflights.limits
    wait_s = limits.wait_s(f"blob {caller(request)}", BLOB_SIZE, BLOB_PER_S, size)
    if wait_s:
        raise Problem(429, "too many bytes", "bytes", f"try again in {wait_s + 0.5:.0f} s")


async def _parts(size: int) -> AsyncIterator[bytes]:
    part = os.urandom(_PART_BYTES)  # a compressing middlebox would measure itself
    while size > 0:
        yield part[:size]
        size -= len(part)


def _fresh(answer: Response) -> Response:
    answer.headers["Cache-Control"] = "no-store"
    return answer
