"""Turns answers into responses: JSON with an ETag, or CSV that a spreadsheet cannot execute."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.responses import RedirectResponse

from rankscope_server.answers import LeftOut
from rankscope_server.problems import ErrorAnswer, Problem, request_id
from rankscope_server.store.chunks import Unread

_encoder = msgspec.json.Encoder()
_documented: dict[str, type[msgspec.Struct]] = {}
_AWAY = "The store cannot be used now, or the server ends."
_RETRY_AFTER = {
    "Retry-After": {"description": "Seconds.", "required": True, "schema": {"type": "integer"}}
}
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def send(request: Request, body: msgspec.Struct, rows: Sequence[msgspec.Struct] = ()) -> Response:
    """Return the answer as JSON, or its `rows` as CSV with `format=csv`; 304 where it is known."""
    unread: Unread | None = getattr(request.state, "unread", None)
    if unread is not None and unread.count:
        body = _without(body, unread.count)
    wanted = request.query_params.get("format", "json")
    if wanted == "csv":
        return _with_etag(request, to_csv(rows).encode(), "text/csv; charset=utf-8")
    if wanted != "json":
        raise Problem(422, f"format {wanted[:20]!r} is not known", "format", "use json or csv")
    return _with_etag(request, _encoder.encode(body), "application/json")


def _without(body: msgspec.Struct, count: int) -> msgspec.Struct:
    """Return an answer that says what it lacks, where it has a field for that."""
    listed: list[LeftOut] | None = getattr(body, "left_out", None)
    if listed is None:
        return body
    lacks = LeftOut(what="chunks whose data is missing or damaged", count=count)
    return msgspec.structs.replace(body, left_out=[*listed, lacks])


def to_csv(rows: Iterable[msgspec.Struct]) -> str:
    """Return rows as CSV, the first line the field names; lists are joined by spaces."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    header: tuple[str, ...] = ()
    for row in rows:
        if not header:
            header = row.__struct_fields__
            writer.writerow(header)
        writer.writerow([_csv_value(getattr(row, name)) for name in header])
    return out.getvalue()


def documented(schema: type[msgspec.Struct]) -> dict[str, Any]:
    """Return what a route declares to OpenAPI: the schema of its answer and of its errors."""
    _documented[schema.__name__] = schema
    return _responses((schema.__doc__ or "").strip(), _content(schema))


def documented_as(media_type: str, description: str) -> dict[str, Any]:
    """Return what a route declares that answers with something else than JSON."""
    return _responses(description, {"content": {media_type: {}}})


def documented_redirect(description: str) -> dict[str, Any]:
    """Return what a route declares that sends browsers elsewhere (303)."""
    where = {"description": description, "required": True, "schema": {"type": "string"}}
    declared = _responses(description, {"headers": {"Location": where}}, 303)
    return {"status_code": 303, "response_class": RedirectResponse, **declared}


def _responses(
    description: str, content: dict[str, Any], status: int = HTTPStatus.OK
) -> dict[str, Any]:
    failed = {"description": (ErrorAnswer.__doc__ or "").strip(), **_content(ErrorAnswer)}
    away = {"description": _AWAY, "headers": _RETRY_AFTER, **_content(ErrorAnswer)}
    answers = {int(status): {"description": description, **content}, "4XX": failed, 503: away}
    return {"responses": answers}


def documented_answers() -> list[type[msgspec.Struct]]:
    """Return the answers of all routes that were declared by now, and that of errors."""
    return [*_documented.values(), ErrorAnswer]


def _content(schema: type[msgspec.Struct]) -> dict[str, Any]:
    reference = {"$ref": f"#/components/schemas/{schema.__name__}"}
    return {"content": {"application/json": {"schema": reference}}}


def _with_etag(request: Request, body: bytes, media_type: str) -> Response:
    etag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    headers = {
        "ETag": etag,
        "Cache-Control": "private, no-cache",
        "X-Request-Id": request_id(request),
    }
    known = request.headers.get("if-none-match", "")
    # gzip on the way makes a weak tag of it; for an answer that is the same thing.
    if etag in {tag.strip().removeprefix("W/") for tag in known.split(",")}:
        return Response(None, 304, headers)
    return Response(body, 200, headers, media_type=media_type)


def _csv_value(value: Any) -> Any:
    if isinstance(value, str):
        # A cell that begins like a formula would be executed by a spreadsheet.
        return "'" + value if value.startswith(_FORMULA) else value
    if isinstance(value, list | tuple):
        return _csv_value(" ".join(str(item) for item in value))
    if isinstance(value, dict | msgspec.Struct):
        return _csv_value(_encoder.encode(value).decode())
    return "" if value is None else value
