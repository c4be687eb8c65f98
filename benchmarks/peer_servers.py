"""What `benchmarks/peers.py` measures beside Rankscope; runs in an environment of its own.

python peer_servers.py json PORT FILE             takes JSON objects, a row each in one table
python peer_servers.py json-indexed PORT FILE     which has two indexes
python peer_servers.py otlp PORT FILE             takes spans of OTLP likewise
python peer_servers.py make-otlp                  turns such JSON (standard input) into OTLP
python peer_servers.py tensorboard COUNT FOLDER   writes so many points; prints points per s
"""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

_TABLE = (
    "CREATE TABLE collective (rank INTEGER, step INTEGER, sequence INTEGER, arrived_ns INTEGER, "
    "started_ns INTEGER, duration_ns INTEGER, blocked_ns INTEGER, size_bytes INTEGER, "
    "group_name TEXT, operation TEXT)"
)
_INSERT = "INSERT INTO collective VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_INDEXES = (
    "CREATE INDEX of_rank ON collective (rank, step)",
    "CREATE INDEX of_step ON collective (step, sequence)",
)
_NUMBERS = ("rank", "step", "sequence", "started_ns", "blocked_ns", "size_bytes")


def serve(
    port: int,
    file: str,
    read: Callable[[bytes], Iterable[tuple[Any, ...]]],
    indexes: Iterable[str] = (),
) -> None:
    """Answer each request once its rows are committed."""
    import uvicorn

    database = sqlite3.connect(file, check_same_thread=False)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=NORMAL")
    for statement in (_TABLE, *indexes):
        database.execute(statement)

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        parts, is_more = [], True
        while is_more:
            message = await receive()
            parts.append(message.get("body", b""))
            is_more = message.get("more_body", False)
        body = b"".join(parts)
        if body:
            with database:
                database.executemany(_INSERT, read(body))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", lifespan="off")


def read_json(body: bytes) -> Iterable[tuple[Any, ...]]:
    """Yield rows; with the decoder of Rankscope where it is installed, which is the fastest."""
    try:
        import msgspec
    except ImportError:
        return map(tuple, (row.values() for row in json.loads(body)))
    return map(tuple, (row.values() for row in msgspec.json.decode(body)))


def read_otlp(body: bytes) -> Iterable[tuple[Any, ...]]:
    """Yield rows of spans."""
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service

    request = service.ExportTraceServiceRequest.FromString(body)
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                of = {one.key: one.value for one in span.attributes}
                start_ns = span.start_time_unix_nano
                yield (
                    of["rank"].int_value, of["step"].int_value, of["sequence"].int_value, start_ns,
                    of["started_ns"].int_value, span.end_time_unix_nano - start_ns,
                    of["blocked_ns"].int_value, of["size_bytes"].int_value,
                    of["group"].string_value, span.name,
                )  # fmt: skip


def make_otlp() -> None:
    """Turn rows of standard input into one request on standard output."""
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service

    request = service.ExportTraceServiceRequest()
    spans = request.resource_spans.add().scope_spans.add().spans
    for number, row in enumerate(json.load(sys.stdin)):
        span = spans.add(
            name=row["operation"],
            trace_id=(1).to_bytes(16, "big"),
            span_id=(number + 1).to_bytes(8, "big"),
            start_time_unix_nano=row["arrived_ns"],
            end_time_unix_nano=row["arrived_ns"] + row["duration_ns"],
        )
        for name in _NUMBERS:
            span.attributes.add(key=name).value.int_value = row[name]
        span.attributes.add(key="group").value.string_value = row["group"]
    sys.stdout.buffer.write(request.SerializeToString())


def write_tensorboard(count: int, folder: str) -> None:
    """Write points into an event file; print how many a second of CPU."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer, tag = EventFileWriter(folder), "rank3/duration_ms"
    before = time.process_time()
    for step in range(count):
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=1.5)])
        writer.add_event(Event(wall_time=1.7e9 + step, step=step, summary=summary))
    writer.flush()
    writer.close()
    sys.stdout.write(f"{count / (time.process_time() - before)}\n")


def main() -> None:
    """Do what the first word says."""
    what, *more = sys.argv[1:]
    if what == "json":
        serve(int(more[0]), more[1], read_json)
    elif what == "json-indexed":
        serve(int(more[0]), more[1], read_json, _INDEXES)
    elif what == "otlp":
        serve(int(more[0]), more[1], read_otlp)
    elif what == "make-otlp":
        make_otlp()
    else:
        write_tensorboard(int(more[0]), more[1])


if __name__ == "__main__":
    main()
