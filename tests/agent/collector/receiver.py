"""A small real server: stores batches once, and can be slow, unwilling or away."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

from msgspec import to_builtins

from rankscope.wire import schema, zstd
from rankscope.wire.chunk import by_rank, decode_chunk


class Receiver:
    """Answers POST /api/v1/ingest. `answer` (status, text) replaces the 200 while it is set."""

    def __init__(self, port: int = 0) -> None:
        self.answer: tuple[int, str] | None = None
        self.location = ""  # of what an answer redirects to
        self.delay_seconds = 0.0
        self.clock = True  # answer POST /api/v1/clock
        self.watermark: schema.Watermark | None = None  # of an answer: what is later is not stored
        self.drop_answers = 0  # store so many batches and close the connection unanswered
        self.batches: dict[tuple[str, int], schema.Batch] = {}
        self.early: dict[tuple[str, int], schema.Batch] = {}  # went past those that waited
        self.arrived: dict[tuple[str, int], float] = {}
        self.asked: list[dict[str, list[str]]] = []  # about watermarks
        self.num_posts = 0
        self.num_bytes = 0  # of the bodies, as they came
        self.headers: dict[str, str] = {}
        self._raw: dict[tuple[str, int], bytes] = {}
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", port), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def said_of_watermark(self) -> dict[str, Any]:
        return {"watermark": to_builtins(self.watermark)} if self.watermark is not None else {}

    def accept(self, body: bytes, *, is_early: bool) -> bool:
        """Take a batch; return whether it is answered."""
        if is_early:
            self.take_early(body)
            return True
        self.take(body)
        is_dropped = self.drop_answers > 0
        self.drop_answers -= is_dropped
        return not is_dropped

    def take(self, body: bytes) -> None:
        self._take(body, self.batches)

    def take_early(self, body: bytes) -> None:
        self._take(body, self.early)

    def _take(self, body: bytes, batches: dict[tuple[str, int], schema.Batch]) -> None:
        raw = zstd.unpack(body, 1 << 30)
        batch = schema.decode_batch(raw)
        key = (batch.producer, batch.sequence)
        with self._lock:
            # a number must never be given to two batches
            assert self._raw.setdefault(key, raw) == raw, f"two batches are {key}"
            batches[key] = batch
            self.arrived.setdefault(key, time.time())

    def records(self, kind: type[Any]) -> list[Any]:
        with self._lock:
            batches = list(self.batches.values())
        decoded = [schema.decode_record(raw) for batch in batches for raw in batch.records]
        return [record for record in decoded if isinstance(record, kind)]

    def rows(self, kind: str, *names: str) -> list[tuple[Any, ...]]:
        """Return (rank, values of the named columns...) of all chunks of a kind."""
        return self._rows(lambda chunk: chunk.kind == kind, names)

    def rows_of_attempt(self, kind: str, attempt: int, *names: str) -> list[tuple[Any, ...]]:
        """Return the same as `rows`, of one attempt."""
        return self._rows(lambda chunk: (chunk.kind, chunk.attempt) == (kind, attempt), names)

    def _rows(
        self, is_wanted: Callable[[schema.Chunk], bool], names: tuple[str, ...]
    ) -> list[tuple[Any, ...]]:
        with self._lock:
            chunks = [chunk for batch in self.batches.values() for chunk in batch.chunks]
        rows: list[tuple[Any, ...]] = []
        for chunk in filter(is_wanted, chunks):
            for rank, columns in by_rank(chunk.rank, decode_chunk(chunk.data)):
                assert set(columns) == set(schema.CHUNK_COLUMNS[chunk.kind])
                values = [list(columns[name]) for name in names]
                rows += [(rank, *row) for row in zip(*values, strict=True)]
        return rows

    def losses(self) -> dict[tuple[str, str], int]:
        """Return the last total of each source and reason."""
        return {(loss.source, loss.reason): loss.count for loss in self.records(schema.Loss)}


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no error here."""


def _handler(receiver: Receiver) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            path = urlsplit(self.path).path  # a whole address where it is taken for a proxy
            if path == "/api/v1/clock":
                now = time.time_ns()
                times = json.dumps({"received_ns": now, "sent_ns": now})
                self._answer(200 if receiver.clock else 404, times)
                return
            assert path == "/api/v1/ingest", self.path
            time.sleep(receiver.delay_seconds)
            receiver.num_posts += 1
            receiver.num_bytes += len(body)
            receiver.headers = dict(self.headers)
            taken = {"accepted_records": 1, "refused": []} | receiver.said_of_watermark()
            status, text = receiver.answer or (200, json.dumps(taken))
            is_early = schema.VITALS_HEADER in self.headers
            if status == 200 and not receiver.accept(body, is_early=is_early):
                self.close_connection = True
                return
            self._answer(status, text)

        def _answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            if receiver.location:
                self.send_header("Location", receiver.location)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self) -> None:
            if urlsplit(self.path).path == "/api/v1/ingest/watermark":
                receiver.asked.append(parse_qs(urlsplit(self.path).query))
            self._answer(200, json.dumps(receiver.said_of_watermark()))

        def log_message(self, format: str, *arguments: Any) -> None:
            """Be quiet."""

    return Handler
