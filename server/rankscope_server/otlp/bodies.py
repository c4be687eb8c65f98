"""Bodies of requests and answers: protobuf or JSON, packed or not; errors as `google.rpc.Status`.

https://opentelemetry.io/docs/specs/otlp/#otlphttp
"""

from __future__ import annotations

import base64
import importlib
import json
import zlib
from typing import Any, Literal, TypeAlias

from rankscope_server.ingest.envelope import unpack_body
from rankscope_server.problems import Problem

Signal: TypeAlias = Literal["traces", "logs", "metrics"]
JSON, PROTOBUF = "application/json", "application/x-protobuf"
_NAMES: dict[Signal, tuple[str, str, str]] = {  # its word, what came of it, what was refused
    "traces": ("Trace", "resource_spans", "rejected_spans"),
    "logs": ("Logs", "resource_logs", "rejected_log_records"),
    "metrics": ("Metrics", "resource_metrics", "rejected_data_points"),
}
_IDS = ("traceId", "spanId", "parentSpanId")
_CODES = {400: 3, 401: 16, 403: 7, 404: 5, 410: 5, 413: 8, 429: 8, 503: 14}  # of gRPC
_UNKNOWN = 2


def messages(signal: Signal) -> Any:
    """Return the module with the messages of a signal. Raises Problem where it is not there."""
    try:
        return importlib.import_module(
            f"opentelemetry.proto.collector.{_NAMES[signal][0].lower()}.v1."
            f"{_NAMES[signal][0].lower()}_service_pb2"
        )
    except ImportError as error:
        raise Problem(
            501, "this server cannot read OpenTelemetry's protocol", None,
            "on the server: pip install 'rankscope[otlp]'",
        ) from error  # fmt: skip


def resources_of(signal: Signal, body: bytes, encoding: str, kind: str, most: int) -> Any:
    """Return what a request holds, by resource. Raises Problem: 400, 413, 415, 501."""
    module = messages(signal)
    request = getattr(module, f"Export{_NAMES[signal][0]}ServiceRequest")()
    unpacked = unpack(body, encoding, most)
    kind = kind.partition(";")[0].strip().lower()
    try:
        if kind == JSON:
            _read_json(unpacked, request)
        elif kind == PROTOBUF:
            request.ParseFromString(unpacked)
        else:
            raise Problem(
                415, f"content type {kind[:60]!r} is not one of the protocol", "Content-Type",
                f"send {PROTOBUF} or {JSON}",
            )  # fmt: skip
    except Problem:
        raise
    except Exception as error:
        raise Problem(
            400, f"not a request to export {signal}: {str(error)[:300]}", "body",
            "send what the protocol says: opentelemetry.io/docs/specs/otlp",
        ) from error  # fmt: skip
    return getattr(request, _NAMES[signal][1])


def _read_json(unpacked: bytes, request: Any) -> None:
    """Fill a request; ids are hexadecimal in this JSON, and not as protobuf has bytes."""
    from google.protobuf.json_format import ParseDict

    ParseDict(json.loads(unpacked, object_hook=_with_ids), request, ignore_unknown_fields=True)


def _with_ids(value: dict[str, Any]) -> dict[str, Any]:
    for name in _IDS:
        if isinstance(text := value.get(name), str):
            try:
                value[name] = base64.b64encode(bytes.fromhex(text)).decode()
            except ValueError as error:
                raise ValueError(f"{name} {text[:40]!r} is not hexadecimal") from error
    return value


def unpack(body: bytes, encoding: str, most: int) -> bytes:
    """Return a body without its content encoding. Raises Problem."""
    encoding = encoding.strip().lower()
    if encoding in ("", "identity", "zstd"):
        return unpack_body(body, encoding, most)
    if encoding != "gzip":
        raise Problem(
            415, f"content encoding {encoding[:40]!r} is not known", "Content-Encoding",
            "send gzip, zstd or no encoding",
        )  # fmt: skip
    unpacker = zlib.decompressobj(wbits=31)
    try:
        unpacked = unpacker.decompress(body, most + 1)
    except zlib.error as error:
        raise Problem(400, f"the body is not gzip: {error}", "body", "pack it again") from error
    if len(unpacked) > most:
        raise Problem(
            413, f"the request unpacks to more than {most} bytes", "body", "send smaller ones"
        )
    if not unpacker.eof:
        raise Problem(400, "the body is gzip that is cut off", "body", "send all of it")
    return unpacked


def answer_of(signal: Signal, num_refused: int, text: str, kind: str) -> tuple[bytes, str]:
    """Return the body of an answer and its content type."""
    module = messages(signal)
    answer = getattr(module, f"Export{_NAMES[signal][0]}ServiceResponse")()
    if num_refused or text:
        setattr(answer.partial_success, _NAMES[signal][2], num_refused)
        answer.partial_success.error_message = text
    if is_json(kind):
        from google.protobuf.json_format import MessageToDict

        return json.dumps(MessageToDict(answer)).encode(), JSON
    return answer.SerializeToString(), PROTOBUF


def is_json(kind: str) -> bool:
    """Return whether a content type is JSON."""
    return kind.partition(";")[0].strip().lower() == JSON


def status_of(problem: Problem, kind: str) -> tuple[bytes, str]:
    """Return a `google.rpc.Status` and its content type: two fields, which need no library."""
    code = _CODES.get(problem.status, _UNKNOWN)
    text = "; ".join(part for part in (problem.what, problem.remedy) if part)
    if is_json(kind):
        return json.dumps({"code": code, "message": text}).encode(), JSON
    data = text.encode()
    return b"\x08" + _varint(code) + b"\x12" + _varint(len(data)) + data, PROTOBUF


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])
