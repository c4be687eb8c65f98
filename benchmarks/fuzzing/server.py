"""A server that is fuzzed: its process, memory and log, and what became of it all."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil

from tests.server.conftest import ServerProcess
from tests.server.postgres import Postgres

_NO_HTTP = "Invalid HTTP request received"  # what uvicorn says of a client's mistake
MOST_SHOWN = 20  # failures of one kind
MOST_ABOVE_IDLE_BYTES = 512 << 20


@dataclass
class Result:
    """What was sent and what became of it."""

    what: str
    database: str
    seed: int
    role: str = ""  # whose token is sent; "none": no token is sent, "open": the server has none
    inputs: int = 0
    statuses: dict[str, dict[str, int]] = field(default_factory=dict)  # by layer or operation
    failures: list[str] = field(default_factory=list)  # answers that are not as declared
    server_errors: list[str] = field(default_factory=list)
    dropped_connections: list[str] = field(default_factory=list)
    refused_that_changed_rows: list[str] = field(default_factory=list)
    sound_batches: int = 0
    sound_batches_refused: list[str] = field(default_factory=list)
    stored: dict[str, int] = field(default_factory=dict)
    wrongly_stored: list[str] = field(default_factory=list)
    pages_asked: int = 0
    pages_failed: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)  # what the server said of itself: nothing
    idle_bytes: int = 0
    most_above_idle_bytes: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of the server

    @property
    def passed(self) -> bool:
        failures = (
            self.failures, self.server_errors, self.dropped_connections,
            self.refused_that_changed_rows, self.sound_batches_refused, self.wrongly_stored,
            self.pages_failed, self.log,
        )  # fmt: skip
        return not any(failures) and self.most_above_idle_bytes < MOST_ABOVE_IDLE_BYTES


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer."""

    status: int
    body: bytes

    def decoded(self) -> Any:
        return msgspec.json.decode(self.body)


class Connection:
    """One kept connection to a server, opened again where it broke."""

    def __init__(self, url: str) -> None:
        self._address, self._kept = urlsplit(url).netloc, None
        self._kept: http.client.HTTPConnection | None

    def ask(self, method: str, path: str, body: bytes | None = None, encoding: str = "") -> Reply:
        """Raises OSError, HTTPException where there is no answer."""
        if self._kept is None:
            self._kept = http.client.HTTPConnection(self._address, timeout=120)
        headers = {"Content-Encoding": encoding} if encoding else {}
        try:
            self._kept.request(method, path, body, headers)
            reply = self._kept.getresponse()
            return Reply(reply.status, reply.read())
        except (OSError, http.client.HTTPException):
            self.close()
            raise

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()
        self._kept = None


class Watched:
    """A server process, with its memory and what it says."""

    def __init__(self, process: ServerProcess, result: Result) -> None:
        self.server, self._result, self._over = process, result, threading.Event()
        assert process.process is not None
        self.process = psutil.Process(process.process.pid)
        self._idle = self.process.memory_info().rss
        result.idle_bytes = max(result.idle_bytes, self._idle)
        self._threads = [threading.Thread(target=work) for work in (self._measure, self._read)]
        for thread in self._threads:
            thread.start()

    def _measure(self) -> None:
        while not self._over.wait(0.05):
            with contextlib.suppress(psutil.NoSuchProcess):
                above = self.process.memory_info().rss - self._idle
                self._result.most_above_idle_bytes = max(self._result.most_above_idle_bytes, above)

    def _read(self) -> None:
        assert self.server.process is not None
        assert self.server.process.stdout is not None
        for line in self.server.process.stdout:
            is_ours = not line.startswith(("Rankscope is", "Log in")) and _NO_HTTP not in line
            if is_ours and len(self._result.log) < 10 * MOST_SHOWN:
                self._result.log.append(line.rstrip())

    def end(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = self.process.cpu_times()
            self._result.cpu_seconds += times.user + times.system
        self._over.set()
        code = self.server.process.poll() if self.server.process is not None else None
        if code is not None:
            self._result.log.append(f"the server ended by itself with {code}")
        self.server.end(timeout=60)
        for thread in self._threads:
            thread.join()


@contextlib.contextmanager
def running(folder: Path, result: Result, *flags: str, **environ: str) -> Iterator[Watched]:
    process = ServerProcess(folder, "--log-level", "warning", *flags, **environ).start()
    server = Watched(process, result)
    try:
        yield server
    finally:
        server.end()


@contextlib.contextmanager
def database(name: str) -> Iterator[str]:
    """Give the address of an empty database; empty: SQLite in the data folder."""
    if name == "sqlite":
        yield ""
        return
    server = Postgres("-c", "fsync=off", "-c", "autovacuum=off").start()
    try:
        yield server.create()
    finally:
        server.close()
