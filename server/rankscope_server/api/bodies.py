"""Bodies of requests: read within a limit, decoded, described for OpenAPI."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect

from rankscope.wire.schema import MAX_VITALS_BYTES, VITALS_HEADER
from rankscope_server.problems import Problem

Asked = TypeVar("Asked", bound=msgspec.Struct)


def are_vitals(request: Request) -> bool:
    """Return whether a batch of states and ends comes, which goes past bulk."""
    declared = request.headers.get("content-length", "")
    is_small = declared.isdecimal() and int(declared) <= MAX_VITALS_BYTES
    return is_small and VITALS_HEADER in request.headers


def takes(body: type[msgspec.Struct]) -> dict[str, Any]:
    """Return what OpenAPI says of a JSON body; without its fields where others are in them."""
    definitions = msgspec.json.schema(body)["$defs"]
    schema = definitions[body.__name__]
    if len(definitions) > 1:
        schema = {"type": "object", "description": " ".join((body.__doc__ or "").split())}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


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


async def read(request: Request, body: type[Asked], max_bytes: int) -> Asked:
    """Return the request's body, decoded. Raises Problem, which names the field."""
    data = await read_body(request, max_bytes)
    try:
        return msgspec.json.decode(data, type=body)
    except (msgspec.MsgspecError, ValueError) as error:
        raise unreadable(error, body) from error


def unreadable(error: Exception, body: type[msgspec.Struct]) -> Problem:
    """Return the problem of a body that cannot be decoded."""
    what = f"not a {body.__name__}: {str(error)[:300]}"
    return Problem(422, what, field_of(error), "see docs/api.md, Preflight")


def field_of(error: Exception) -> str:
    """Return the path of the field that msgspec refused, or that it missed; else "body"."""
    problem, _, path = str(error).partition(" - at `$")
    missing = problem.partition("missing required field `")[2].rstrip("`")
    return f"{path.rstrip('`')}.{missing}".strip(".") or "body"
