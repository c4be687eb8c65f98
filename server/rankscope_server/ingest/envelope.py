"""Unpacks a request body and reads the envelope of a batch; its parts are validated elsewhere."""

from __future__ import annotations

import re

import msgspec

from rankscope.wire import zstd
from rankscope.wire.schema import SCHEMA_VERSION
from rankscope_server.ingest.records import MAX_TIME_NS
from rankscope_server.problems import Problem

MAX_RECORDS = 200_000
MAX_CHUNKS = 4_096
MAX_SEQUENCE = 1 << 48  # so that those of all producers of a run can be added up
RUN_ID, NAME = r"[A-Za-z0-9._-]{1,128}", r"[^\x00-\x1f\x7f]{1,255}"
_PLACE = re.compile(r"`\$\.?([^`]*)`")


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """`rankscope.wire.schema.Batch`, its records and chunks not yet looked at."""

    schema_version: int
    run_id: str
    producer: str
    sequence: int
    host: str
    sent_ns: int
    records: list[msgspec.Raw] = []
    chunks: list[msgspec.Raw] = []


class _Version(msgspec.Struct):
    schema_version: int


_decode_version = msgspec.msgpack.Decoder(_Version).decode
_decode_envelope = msgspec.msgpack.Decoder(Envelope).decode


def unpack_body(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Return the body without its content encoding, at most `max_bytes` long.

    Raises Problem: 415 unknown encoding, 400 broken, 413 too large.
    """
    encoding = encoding.strip().lower()
    if encoding in {"", "identity"}:
        return body
    if encoding != "zstd":
        raise Problem(
            415, f"content encoding {encoding[:40]!r} is not known", "Content-Encoding",
            "send zstd or no encoding",
        )  # fmt: skip
    try:
        return zstd.unpack(body, max_bytes)
    except zstd.ZstdError as error:
        raise Problem(
            400, f"the body is not a zstd frame: {error}", "body", "compress it again"
        ) from error
    except zstd.UnpackedTooLargeError as error:
        raise Problem(
            413, f"the batch unpacks to more than {max_bytes} bytes", "body", "send smaller batches"
        ) from error


def read_envelope(body: bytes) -> Envelope:
    """Return the envelope. Raises Problem: 400 not a batch, 422 unsupported version."""
    try:
        version = _decode_version(body).schema_version
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _malformed(error) from error
    if version != SCHEMA_VERSION:
        raise Problem(
            422, f"schema version {version} is not supported", "schema_version",
            f"this server reads version {SCHEMA_VERSION}; "
            + ("update the server" if version > SCHEMA_VERSION else "update the agent"),
        )  # fmt: skip
    try:
        envelope = _decode_envelope(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _malformed(error) from error
    _check(envelope)
    return envelope


def _check(envelope: Envelope) -> None:
    def refuse(field: str, why: str, remedy: str) -> None:
        raise Problem(400, f"{field} {why}", field, remedy)

    if not re.fullmatch(RUN_ID, envelope.run_id) or envelope.run_id in {".", ".."}:
        refuse(
            "run_id", "is not a run id", "use 1 to 128 letters, digits, dots, dashes, underscores"
        )
    for field in ("producer", "host"):
        if not re.fullmatch(NAME, getattr(envelope, field)):
            refuse(
                field,
                "is empty, too long or holds control characters",
                "send 1 to 255 printable characters",
            )
    if not 1 <= envelope.sequence < MAX_SEQUENCE:
        refuse("sequence", f"{envelope.sequence} is out of range", "count from 1 for each producer")
    if not 0 <= envelope.sent_ns < MAX_TIME_NS:
        refuse("sent_ns", f"{envelope.sent_ns} is not a time", "send nanoseconds since the epoch")
    if len(envelope.records) > MAX_RECORDS:
        refuse("records", f"holds more than {MAX_RECORDS}", "send smaller batches")
    if len(envelope.chunks) > MAX_CHUNKS:
        refuse("chunks", f"holds more than {MAX_CHUNKS}", "send smaller batches")


def _malformed(error: Exception) -> Problem:
    text = str(error)
    place = _PLACE.search(text)
    field = place.group(1) if place else "body"
    return Problem(
        400, f"not a batch: {text[:300]}", field or "body",
        "send one msgpack map as rankscope.wire.schema.Batch describes",
    )  # fmt: skip
