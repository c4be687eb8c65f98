"""Sends batches to the server, on a thread of its own.

A batch stays in the spool until the server says by a watermark that it is stored, or has answered
200 and gives no watermark. A (producer, sequence) is stored once however often it comes.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

from rankscope.node.upload.clock import CLOCK_PATH, ClockExchange
from rankscope.node.upload.server import Server, ServerAnswer
from rankscope.node.upload.spool import Spool, SpoolEntry
from rankscope.node.upload.traces import TraceWorker
from rankscope.node.upload.vitals import Vitals
from rankscope.wire import schema

_FIRST_BACKOFF_SECONDS, _LAST_BACKOFF_SECONDS = 0.2, 5.0
_MAX_RETRY_AFTER_SECONDS = 30.0
_SAY_EVERY_SECONDS = 60.0
_UNREADABLE_SECONDS = 600.0  # so long a file of the spool may be in the way of those behind it

logger = logging.getLogger(__name__)


class Uploader(threading.Thread):
    """Empties the spool, oldest first. `on_refused(items, reason)` hears of refused batches."""

    def __init__(
        self,
        server: Server,
        spool: Spool,
        on_refused: Callable[[int, str], None],
        jitter: Callable[[], float] = random.random,
        on_commands: Callable[[list[schema.Command]], None] = lambda commands: None,
        traces: TraceWorker | None = None,
        clock: ClockExchange | None = None,
        vitals: Vitals | None = None,
        run_id: str = "",
    ) -> None:
        super().__init__(name="rankscope-upload", daemon=True)
        self._server = server
        self._spool = spool
        self._on_refused = on_refused
        self._jitter = jitter
        self._on_commands = on_commands
        self._traces = traces
        self._clock = clock
        self._vitals = vitals
        self._run_id = run_id
        self._num_refused: dict[str, int] = {}  # by producer, as the server says
        self._ending = threading.Event()
        self._failures = 0
        self._failing_since = 0.0
        self._said_at = -_SAY_EVERY_SECONDS
        self._unread: tuple[SpoolEntry, float] | None = None  # and since when, monotonic

    def hurry(self) -> None:
        """The collector ends soon: no more long waits."""
        self._ending.set()

    def run(self) -> None:
        """Send for ever; the thread ends with the process."""
        while True:
            try:
                self._turn()
            except Exception as error:  # noqa: BLE001 - the guard of this thread
                self._wait(f"{type(error).__name__}: {error}", error=error)

    def _turn(self) -> None:
        traces = self._traces
        has_parts = traces is not None and traces.has_parts()
        entry = self._spool.take(timeout_seconds=0.0 if has_parts else 1.0)
        if entry is not None:
            self._send_vitals()
            self._send(entry)
        elif not has_parts:
            self._ask_watermarks()
        if traces is not None and not self._failures:
            traces.send_part(self._server)
        if self._clock is not None and entry is not None and not self._failures:
            self._clock.turn(self._ask_clock)

    def _ask_clock(self) -> tuple[int, str]:
        answer = self._server.send(CLOCK_PATH, b"", {})
        return answer.status, answer.text

    def _send_vitals(self) -> None:
        """Send what goes past the batches that wait; what fails comes with them."""
        body = None if self._vitals is None else self._vitals.due(self._spool.waiting()[0])
        if self._vitals is None or body is None:
            return
        answer = self._server.post(body, has_waited=False)
        is_accepted = answer.status == 200 and answer.is_ours
        self._vitals.sent(is_accepted=is_accepted)
        if is_accepted and (commands := answer.commands()):
            self._on_commands(commands)

    def _send(self, entry: SpoolEntry) -> None:
        try:
            body = entry.body()
        except FileNotFoundError:
            self._spool.done(entry)
            return
        except OSError as error:  # no descriptor is free, or the disk does not answer
            self._wait_for_file(entry, error)
            return
        except (ValueError, RecursionError) as error:
            self._refused(entry, f"spool file unreadable: {error}")
            return
        held_from = self._spool.oldest_held().get(entry.producer, entry.sequence)
        answer = self._server.post(body, held_from=held_from if entry.producer else 0)
        if answer.status == 200 and answer.is_ours:
            self._accepted(entry, answer)
        elif answer.is_refusal:
            why = f": {answer.reason}" if answer.is_error else ""  # a proxy's text may be a new one
            self._refused(entry, f"HTTP {answer.status}{why}")
        else:
            status = f"HTTP {answer.status}: " if answer.status else ""
            self._wait(f"{status}{answer.reason}", answer.retry_after_seconds)

    def _wait_for_file(self, entry: SpoolEntry, error: OSError) -> None:
        if self._unread is None or self._unread[0] is not entry:
            self._unread = (entry, time.monotonic())
        if time.monotonic() - self._unread[1] > _UNREADABLE_SECONDS:
            self._refused(entry, f"spool file unreadable: {error.strerror}")
        else:
            self._wait(f"{entry.path}: {error.strerror}")

    def _accepted(self, entry: SpoolEntry, answer: ServerAnswer) -> None:
        if answer.fields.get("refused"):
            logger.warning(
                "the server refused parts of batch %d: %.2000s", entry.sequence, answer.text
            )
            for part in _refused_parts(answer):
                self._on_refused(1, part)
        if answer.watermark is None or not entry.producer:
            self._spool.done(entry)
        else:
            self._spool.hold(entry)
            # of a producer that an earlier life of this process began, that one knew of some
            refused = answer.watermark.refused if entry.sequence > 1 else 0
            self._num_refused.setdefault(entry.producer, refused)
            self._settle(entry.producer, answer.watermark)
        if self._failures:
            logger.warning(
                "batches are sent again after %.1f s",
                time.monotonic() - self._failing_since,
            )
        self._failures = 0
        commands = answer.commands()
        if commands:
            self._on_commands(commands)

    def _ask_watermarks(self) -> None:
        """Ask how far the server has stored what it accepted, where no batch is there to send."""
        for producer, number in self._spool.oldest_held().items():
            answer = self._server.ask_watermark(self._run_id, producer, number)
            if answer.status == 200 and answer.watermark is not None:
                self._settle(producer, answer.watermark)
        self._spool.send_again_if_still()

    def _settle(self, producer: str, watermark: schema.Watermark) -> None:
        """Release what is stored, and count what was refused since it was accepted."""
        more = watermark.refused - self._num_refused[producer]
        if more > 0:
            self._num_refused[producer] = watermark.refused
            logger.warning("the server refused %d records and chunks of earlier batches", more)
            self._on_refused(more, "refused when it was accepted already")
        self._spool.settle(producer, watermark)

    def _refused(self, entry: SpoolEntry, reason: str) -> None:
        logger.error(
            "batch %d with %d records and events is refused for good and dropped: %s",
            entry.sequence, entry.num_items, reason,
        )  # fmt: skip
        self._on_refused(entry.num_items, reason)
        self._spool.done(entry)

    def _wait(
        self, reason: str, asked_seconds: float = 0.0, *, error: Exception | None = None
    ) -> None:
        now = time.monotonic()
        if not self._failures:
            self._failing_since = now
        self._failures += 1
        if now - self._said_at > _SAY_EVERY_SECONDS:
            self._said_at = now
            logger.warning("batches wait in the spool (%s)", reason, exc_info=error)
        backoff = min(
            _FIRST_BACKOFF_SECONDS * 2 ** min(self._failures - 1, 10), _LAST_BACKOFF_SECONDS
        )
        backoff *= 0.5 + self._jitter() / 2
        if self._ending.is_set():
            time.sleep(min(backoff, 2 * _FIRST_BACKOFF_SECONDS))
        else:
            self._ending.wait(max(backoff, min(asked_seconds, _MAX_RETRY_AFTER_SECONDS)))


def _refused_parts(answer: ServerAnswer) -> list[str]:
    """Return for each refused record or chunk what it was and which field the server named."""
    refused = answer.fields["refused"]
    parts = (
        [part for part in refused if isinstance(part, dict)] if isinstance(refused, list) else []
    )
    return [f"refused {part.get('kind')}: {part.get('field')}" for part in parts]
