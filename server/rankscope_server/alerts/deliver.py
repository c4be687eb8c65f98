"""Sends what waits, in threads of its own: each channel by itself, a problem's messages in order.

At least once: a delivery is marked only after it was taken, so one that a killed server had just
sent is sent again with the same id. What fails is tried again ever less often, and is given up
after a day; that is shown.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

from rankscope_server.alerts import store
from rankscope_server.alerts.message import Message
from rankscope_server.alerts.quiet import waits_until_ns
from rankscope_server.alerts.send import send
from rankscope_server.alerts.send.outbound import DeliveryError, Outbound
from rankscope_server.alerts.store import StoredChannel
from rankscope_server.store.engine import StoreUnavailableError
from rankscope_server.store.leases import Held
from rankscope_server.store.locks import ALERTS
from rankscope_server.store.unit import Unit
from rankscope_server.store.writer import Writer

log = logging.getLogger(__name__)
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 2.0, 600.0
GIVE_UP_SECONDS = 86_400.0
IDLE_SECONDS = 30.0  # between two looks at what waits, where nothing wakes it
ELSEWHERE_SECONDS = 2.0  # between two looks whether this process is to send
_AT_A_TIME = 8  # channels
_QUIET = "quiet hours until"
_Done = TypeVar("_Done")
_TURN = 20  # messages of a channel, until what waits is read anew


@dataclass(frozen=True, slots=True)
class Waiting:
    """A delivery that is due."""

    id: int
    alert_id: int
    attempts: int
    created_ns: int
    was_held: bool  # by quiet hours
    message: Message


def pause_seconds(attempts: int, spread: float) -> float:
    """Return how long to wait after so many attempts; `spread` in 0-1 keeps senders apart."""
    pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(attempts - 1, 20))
    return pause * (0.75 + 0.5 * spread)


class Deliverer:
    """Owns the threads that send. `start` and `close` once, `wake` from any thread."""

    def __init__(
        self, writer: Writer, reader: sa.Engine, outbound: Outbound,
        lease: Callable[[], Held | None],
        clock: Callable[[], int] = time.time_ns,
    ) -> None:  # fmt: skip
        self._writer, self._reader, self._outbound, self._clock = writer, reader, outbound, clock
        self._lease = lease
        self._awake = threading.Event()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._busy: set[int] = set()  # channels that are being served
        self._rests: dict[int, tuple[int, int]] = {}  # channel: failures in a row, until when
        self._unmarked: dict[int, tuple[str, str, int]] = {}  # sent, and not yet stored as sent
        self._thread = threading.Thread(target=self._work, name="rankscope-deliver", daemon=True)

    def start(self) -> None:
        """Begin to send, first of all what a server before this one left."""
        self._awake.set()
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Return whether the thread works."""
        return self._thread.is_alive()

    def close(self, timeout_seconds: float = 2.0) -> None:
        """Send no more; what is under way is sent again by the next server."""
        self._stop.set()
        self._awake.set()
        self._thread.join(timeout_seconds)

    def wake(self) -> None:
        """Say that something new waits."""
        self._awake.set()

    def _work(self) -> None:
        pause = IDLE_SECONDS
        while not self._stop.is_set():
            self._awake.wait(pause)
            self._awake.clear()
            if self._stop.is_set():
                return
            try:
                pause = self._hand_out()
            except StoreUnavailableError as error:
                log.warning("alerts wait: %s", error)
                pause = IDLE_SECONDS
            except Exception as error:
                log.error("alerts are not sent now", exc_info=error)
                pause = IDLE_SECONDS

    def _hand_out(self) -> float:
        """Give each idle channel its due messages; return in how many seconds to look again."""
        self._mark_sent()
        if self._lease() is None:
            return ELSEWHERE_SECONDS
        now_ns = self._clock()
        with self._reader.connect() as connection:
            rows = store.waiting(connection)
            known = {one.id: one for one in store.channels(connection)}
        by_channel, next_ns = self._due(rows, now_ns)
        for channel_id, due in by_channel.items():
            with self._lock:
                if len(self._busy) >= _AT_A_TIME:
                    break  # it is looked at again once one of them is done
                self._busy.add(channel_id)
            # No pool: at its end a program waits for the threads of pools, and for their receivers.
            work = (known.get(channel_id), channel_id, due)
            threading.Thread(
                target=self._serve, args=work, name="rankscope-send", daemon=True
            ).start()
        return min(IDLE_SECONDS, max(0.05, (next_ns - now_ns) / 1e9))

    def _due(
        self, rows: Iterable[sa.Row[Any]], now_ns: int
    ) -> tuple[dict[int, list[Waiting]], int]:
        """Return what is due by channel, and when the next one is."""
        next_ns = now_ns + int(IDLE_SECONDS * 1e9)
        found: dict[int, list[Waiting]] = {}
        before: set[tuple[int, int]] = set()  # problems of which an earlier message waits
        with self._lock:
            busy, rests = set(self._busy), dict(self._rests)
        for row in rows:
            about = (row.channel_id, row.alert_id)
            is_first = about not in before or not row.alert_id
            before.add(about)
            if row.channel_id in busy or row.id in self._unmarked or not is_first:
                continue
            due_ns = max(row.next_ns, rests.get(row.channel_id, (0, 0))[1])
            if due_ns > now_ns:
                next_ns = min(next_ns, due_ns)
                continue
            mine = found.setdefault(row.channel_id, [])
            if len(mine) < _TURN:
                message = msgspec.json.decode(row.message, type=Message)
                was_held = row.note.startswith(_QUIET)
                mine.append(
                    Waiting(row.id, row.alert_id, row.attempts, row.created_ns, was_held, message)
                )
        return found, next_ns

    def _serve(self, one: StoredChannel | None, channel_id: int, due: list[Waiting]) -> None:
        try:
            for waiting in due:
                if self._stop.is_set() or not self._serve_one(one, waiting):
                    break
        except StoreUnavailableError as error:
            log.warning("alerts wait: %s", error)
        except Exception as error:
            log.error("a delivery failed", exc_info=error)
        finally:
            with self._lock:
                self._busy.discard(channel_id)
            self._awake.set()

    def _serve_one(self, one: StoredChannel | None, waiting: Waiting) -> bool:
        """Send one message; return whether the channel takes more now."""
        if one is None or not one.is_enabled:
            self._end(waiting, "dropped", "its channel is switched off or deleted")
            return True
        until_ns = waits_until_ns(one.quiet, waiting.message.severity, self._clock())
        if until_ns:
            self._run(lambda unit: store.put_off(
                unit, waiting.id, until_ns, f"{_QUIET} {one.quiet and one.quiet.end}",
                waiting.attempts,
            ))  # fmt: skip
            return True
        if waiting.alert_id and self._is_over(one, waiting):
            return True
        if not self._is_to_send(waiting):
            return True
        try:
            send(one.target, waiting.message, self._outbound)
        except DeliveryError as error:
            return self._failed(one, waiting, error)
        with self._lock:
            self._rests.pop(one.id, None)
        self._end(waiting, "sent", "")
        return True

    def _is_to_send(self, waiting: Waiting) -> bool:
        """Return whether no process has sent it since it was read; this one may have slept."""
        lease = self._lease()
        if lease is None:
            return False
        with self._reader.connect() as connection:
            return lease.is_held(connection) and store.is_pending(connection, waiting.id)

    def _is_over(self, one: StoredChannel, waiting: Waiting) -> bool:
        """Skip what the quiet hours held back and what is over now; return whether it was."""
        if not waiting.was_held or waiting.message.event != "opened" or waiting.attempts:
            return False
        return self._run(lambda unit: store.skip_what_is_over(unit, waiting.alert_id, one.id))

    def _failed(self, one: StoredChannel, waiting: Waiting, error: DeliveryError) -> bool:
        attempts, now_ns = waiting.attempts + 1, self._clock()
        is_old = now_ns - waiting.created_ns > GIVE_UP_SECONDS * 1e9
        if error.is_final or is_old:
            why = str(error) if error.is_final else f"tried for a day: {error}"
            log.warning("an alert was not sent to %s, and is given up: %s", one.name, why)
            self._end(waiting, "given_up", why)
            return True
        pause = max(pause_seconds(attempts, random.random()), error.retry_after_seconds)
        pause = min(pause, 2 * LONGEST_PAUSE_SECONDS)
        with self._lock:
            failures = self._rests.get(one.id, (0, 0))[0] + 1
            rest = max(pause_seconds(failures, 0.5), error.retry_after_seconds)
            rest = min(rest, LONGEST_PAUSE_SECONDS)
            self._rests[one.id] = (failures, now_ns + int(rest * 1e9))
        next_ns = now_ns + int(pause * 1e9)
        self._run(lambda unit: store.put_off(unit, waiting.id, next_ns, str(error), attempts))
        return False

    def _end(self, waiting: Waiting, state: str, note: str) -> None:
        attempts = waiting.attempts + (state in ("sent", "given_up"))
        with self._lock:
            self._unmarked[waiting.id] = (state, note, attempts)
        self._mark_sent()

    def _mark_sent(self) -> None:
        """Store what was sent; where the store does not take it, it is not sent again meanwhile."""
        with self._lock:
            ended = dict(self._unmarked)
        if not ended:
            return

        def work(unit: Unit) -> None:
            for delivery_id, (state, note, attempts) in ended.items():
                store.end_delivery(unit, delivery_id, state, note, attempts)

        with contextlib.suppress(StoreUnavailableError):
            self._run(work)
            with self._lock:
                for delivery_id in ended:
                    self._unmarked.pop(delivery_id, None)

    def _run(self, work: Callable[[Unit], _Done]) -> _Done:
        return self._writer.run(work, lock=ALERTS)
