"""Brings batches to the server, on a thread of its own, with the standard library only.

A batch stays in the spool until the server has answered 200: it answers only what is durable, and
stores a (producer, sequence) once however often it comes.
"""

from __future__ import annotations

import http.client
import json
import logging
import random
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from rankscope.node.traces.traces import TraceWorker
from rankscope.node.upload.clock import CLOCK_PATH, ClockExchange
from rankscope.node.upload.spool import Entry, Spool
from rankscope.wire import schema

INGEST_PATH = "/api/v1/ingest"
_BATCH_HEADERS = {
    "Content-Type": "application/msgpack",
    "Content-Encoding": "zstd",
    schema.COMMANDS_HEADER: str(schema.COMMANDS_VERSION),
}
TIMEOUT_SECONDS = 5.0
_FIRST_BACKOFF_SECONDS, _LAST_BACKOFF_SECONDS = 0.2, 5.0
_MAX_RETRY_AFTER_SECONDS = 30.0
_RETRIED = frozenset({401, 408, 429})  # of the 4xx: a token may be mended, the load may pass
_SAY_EVERY_SECONDS = 60.0
_MAX_ANSWER_BYTES = 1 << 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """What became of one attempt: `status` 0 is a network error."""

    status: int
    text: str
    retry_after_seconds: float = 0.0

    @property
    def is_ours(self) -> bool:
        """It is an answer of ingest, not of some proxy that says 200 to everything."""
        return "accepted_records" in self.fields

    @property
    def fields(self) -> dict[str, Any]:
        """The JSON object of the answer, empty if it is none."""
        try:
            fields = json.loads(self.text)
        except ValueError:
            return {}
        return fields if isinstance(fields, dict) else {}

    def commands(self) -> list[schema.Command]:
        """Return what the server asks for; kinds that we do not know are left to newer ones."""
        found = self.fields.get("commands", [])
        commands = []
        for one in found if isinstance(found, list) else []:
            try:
                commands.append(msgspec.convert(one, schema.Command))
            except msgspec.ValidationError as error:
                logger.info("a command of the server is not understood: %s", error)
        return commands

    @property
    def is_refusal(self) -> bool:
        """The server will never take this batch."""
        return 400 <= self.status < 500 and self.status not in _RETRIED


class Server:
    """One keep-alive connection. Raises ValueError for an address that is none."""

    def __init__(self, url: str, token: str, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"RANKSCOPE_SERVER={url!r}: expected http://HOST:PORT")
        self._is_tls = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port  # .port raises ValueError too
        self._prefix = parts.path.rstrip("/")
        self._timeout_seconds = timeout_seconds
        self._headers = {"User-Agent": "rankscope-collector"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._connection: http.client.HTTPConnection | None = None

    def post(self, body: bytes) -> Answer:
        """Send one batch."""
        return self.send(INGEST_PATH, body, _BATCH_HEADERS)

    def send(self, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        """Send a POST. A kept connection that the server closed meanwhile is tried anew once."""
        is_kept = self._connection is not None
        try:
            return self._send(path, body, headers)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if not is_kept or isinstance(error, TimeoutError):
                return Answer(0, f"{type(error).__name__}: {error}")
        try:
            return self._send(path, body, headers)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            return Answer(0, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Close the connection; the next post opens one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _send(self, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        if self._connection is None:
            self._connection = self._connect()
        headers = self._headers | headers
        self._connection.request("POST", self._prefix + path, body, headers)
        response = self._connection.getresponse()
        text = response.read(_MAX_ANSWER_BYTES).decode(errors="replace")
        if response.will_close or not response.isclosed():
            self.close()
        wait = response.headers.get("Retry-After", "")
        return Answer(response.status, text, float(wait) if wait.isdecimal() else 0.0)

    def _connect(self) -> http.client.HTTPConnection:
        if self._is_tls:
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=self._timeout_seconds,
                context=ssl.create_default_context(),
            )  # fmt: skip
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_seconds)


class Uploader(threading.Thread):
    """Empties the spool, oldest first. `on_refused(items, reason)` is told of refused batches."""

    def __init__(
        self,
        server: Server,
        spool: Spool,
        on_refused: Callable[[int, str], None],
        jitter: Callable[[], float] = random.random,
        on_commands: Callable[[list[schema.Command]], None] = lambda commands: None,
        traces: TraceWorker | None = None,
        clock: ClockExchange | None = None,
    ) -> None:
        super().__init__(name="rankscope-upload", daemon=True)
        self._server = server
        self._spool = spool
        self._on_refused = on_refused
        self._jitter = jitter
        self._on_commands = on_commands
        self._traces = traces
        self._clock = clock
        self._ending = threading.Event()
        self._failures = 0
        self._failing_since = 0.0
        self._said_at = -_SAY_EVERY_SECONDS

    def hurry(self) -> None:
        """The collector ends soon: no long waits any more."""
        self._ending.set()

    def run(self) -> None:
        """Send for ever; the thread ends with the process."""
        while True:
            traces = self._traces
            has_parts = traces is not None and traces.has_parts()
            entry = self._spool.take(timeout_seconds=0.0 if has_parts else 1.0)
            if entry is not None:
                self._send(entry)
            if traces is not None and not self._failures:
                traces.send_part(self._server)
            if self._clock is not None and entry is not None and not self._failures:
                self._clock.turn(self._ask_clock)

    def _ask_clock(self) -> tuple[int, str]:
        answer = self._server.send(CLOCK_PATH, b"", {})
        return answer.status, answer.text

    def _send(self, entry: Entry) -> None:
        try:
            body = entry.body()
        except FileNotFoundError:
            self._spool.done(entry)
            return
        except (OSError, ValueError) as error:
            self._refused(entry, f"spool file unreadable: {error}")
            return
        answer = self._server.post(body)
        if answer.status == 200 and answer.is_ours:
            self._accepted(entry, answer)
        elif answer.is_refusal:
            self._refused(entry, f"HTTP {answer.status}: {_what(answer.text)}")
        else:
            self._wait_after(answer)

    def _accepted(self, entry: Entry, answer: Answer) -> None:
        self._spool.done(entry)
        if self._failures:
            logger.warning(
                "the server takes batches again after %.1f s",
                time.monotonic() - self._failing_since,
            )
        self._failures = 0
        commands = answer.commands()
        if commands:
            self._on_commands(commands)
        if answer.fields.get("refused"):
            logger.warning(
                "the server refused parts of batch %d: %.2000s", entry.sequence, answer.text
            )
            for part in _refused_parts(answer):
                self._on_refused(1, part)

    def _refused(self, entry: Entry, reason: str) -> None:
        logger.error(
            "batch %d with %d records and events is refused for good and dropped: %s",
            entry.sequence, entry.num_items, reason,
        )  # fmt: skip
        self._on_refused(entry.num_items, reason)
        self._spool.done(entry)

    def _wait_after(self, answer: Answer) -> None:
        now = time.monotonic()
        if not self._failures:
            self._failing_since = now
        self._failures += 1
        if now - self._said_at > _SAY_EVERY_SECONDS:
            self._said_at = now
            reason = _what(answer.text)
            if answer.status:
                reason = f"HTTP {answer.status}: {reason}"
            logger.warning("the server takes no batches (%s); they wait in the spool", reason)
        backoff = min(
            _FIRST_BACKOFF_SECONDS * 2 ** min(self._failures - 1, 10), _LAST_BACKOFF_SECONDS
        )
        backoff *= 0.5 + self._jitter() / 2
        if self._ending.is_set():
            time.sleep(min(backoff, 2 * _FIRST_BACKOFF_SECONDS))
        else:
            asked = min(answer.retry_after_seconds, _MAX_RETRY_AFTER_SECONDS)
            self._ending.wait(max(backoff, asked))


def _refused_parts(answer: Answer) -> list[str]:
    """Return for each refused record or chunk what it was and which field the server named."""
    refused = answer.fields["refused"]
    parts = (
        [part for part in refused if isinstance(part, dict)] if isinstance(refused, list) else []
    )
    return [f"refused {part.get('kind')}: {part.get('field')}" for part in parts]


def _what(text: str) -> str:
    """Return the reason in an error answer of the server, or the start of the text."""
    try:
        error = json.loads(text)["error"]
        return f"{error['what']} ({error['field']}: {error['remedy']})"
    except (ValueError, KeyError, TypeError):
        return text[:200]
