"""Traces on their way to the server: summed up and compressed here, sent in parts.

A thread of its own does the work that takes seconds; the parts go over the uploader's connection
between two batches, so that a long trace holds nothing up.
"""

from __future__ import annotations

import contextlib
import gzip
import logging
import queue
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from rankscope.files.run_directory import make_private
from rankscope.node.upload.server import Server
from rankscope.node.upload.trace_summary import summarise
from rankscope.wire.schema import MAX_TRACE_BYTES, OperatorTime

PART_BYTES = 1 << 20
GIVE_UP_SECONDS = 600.0  # without any success
_RETRY_SECONDS = 1.0
_NOT_ASKED_FOR = 404  # the run, or the command, was deleted
_COPY_BYTES = 1 << 18

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trace:
    """A trace file of a rank; `name` comes back with the result."""

    name: str
    command: int
    rank: int
    path: Path
    text: str


@dataclass(frozen=True)
class TraceResult:
    """What became of a trace. `why` is empty where it has arrived."""

    name: str
    text: str
    why: str = ""
    num_bytes: int = 0
    operators: list[OperatorTime] = field(default_factory=list)


@dataclass
class _Outgoing:
    trace: Trace
    path: Path
    size: int
    operators: list[OperatorTime]
    deadline: float
    sent: int = 0
    next_try: float = 0.0


class TraceWorker(threading.Thread):
    """Prepares traces; `send_part` is called by the uploader's thread."""

    def __init__(self, run_id: str, directory: Path) -> None:
        super().__init__(name="rankscope-traces", daemon=True)
        self._run_id = run_id
        self._directory = directory
        self._jobs: queue.SimpleQueue[Trace] = queue.SimpleQueue()
        self._outgoing: queue.SimpleQueue[_Outgoing] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[TraceResult] = queue.SimpleQueue()
        self._now_sending: _Outgoing | None = None

    def put(self, trace: Trace) -> None:
        """Take a finished trace; the thread starts with the first one."""
        self._jobs.put(trace)
        if not self.is_alive():
            self.start()

    def results(self) -> Iterator[TraceResult]:
        """Yield what is done with since the last call."""
        while not self._done.empty():
            yield self._done.get()

    def has_parts(self) -> bool:
        """Return whether a part could be sent now."""
        sending = self._now_sending
        if sending is None:
            return not self._outgoing.empty()
        return time.monotonic() >= sending.next_try

    def run(self) -> None:
        """Prepare traces for ever; the thread ends with the process."""
        make_private(self._directory)
        while True:
            trace = self._jobs.get()
            try:
                self._prepare(trace)
            except (OSError, ValueError, MemoryError) as error:
                reason = f"the trace cannot be used: {error}"
                self._done.put(TraceResult(trace.name, reason, why=reason))

    def _prepare(self, trace: Trace) -> None:
        operators = summarise(trace.path)
        packed = self._directory / f"{trace.command}.{trace.rank}.json.gz"
        with trace.path.open("rb") as source, gzip.open(packed, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target, _COPY_BYTES)
        size = packed.stat().st_size
        if size > MAX_TRACE_BYTES:
            packed.unlink()
            raise ValueError(
                f"it has {size >> 20} MiB compressed, more than {MAX_TRACE_BYTES >> 20}; "
                "ask for fewer steps"
            )
        deadline = time.monotonic() + GIVE_UP_SECONDS
        self._outgoing.put(_Outgoing(trace, packed, size, operators, deadline))

    # --- the uploader's side -------------------------------------------------------------

    def send_part(self, server: Server) -> None:
        """Send one part of one trace, if there is any."""
        if self._now_sending is None:
            if self._outgoing.empty():
                return
            self._now_sending = self._outgoing.get()
        sending = self._now_sending
        if time.monotonic() < sending.next_try:
            return
        try:
            with sending.path.open("rb") as file:
                file.seek(sending.sent)
                part = file.read(PART_BYTES)
        except OSError as error:
            self._finish(sending, f"the trace cannot be read: {error}")
            return
        trace = sending.trace
        path = (
            f"/api/v1/runs/{quote(self._run_id, safe='')}/commands/{trace.command}/ranks/"
            f"{trace.rank}/trace?offset={sending.sent}&total={sending.size}"
        )
        answer = server.send(path, part, {"Content-Type": "application/gzip"})
        if answer.status == 200 and "received_bytes" in answer.fields:
            sending.sent += len(part)
            sending.deadline = time.monotonic() + GIVE_UP_SECONDS
            if sending.sent >= sending.size:
                self._finish(sending, "")
        elif answer.is_refusal or answer.status == _NOT_ASKED_FOR:
            self._finish(sending, f"the server refuses the trace: {answer.reason}")
        elif time.monotonic() > sending.deadline:
            self._finish(sending, "the server did not take the trace")
        else:
            sending.next_try = time.monotonic() + _RETRY_SECONDS

    def _finish(self, sending: _Outgoing, why: str) -> None:
        self._now_sending = None
        trace = sending.trace
        with contextlib.suppress(OSError):
            sending.path.unlink()
        text = why or trace.text
        self._done.put(TraceResult(trace.name, text, why, sending.size, sending.operators))
