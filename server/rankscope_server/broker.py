"""Hints for the event stream: what changed, at most twice a second for each topic.

The more listen, the longer the pause.

Publishers are threads (the analysis, ingest); subscribers live in the event loop. A hint carries
no data: who missed some asks for everything anew. What this process publishes is relayed to others
on the same store, and what they relay is handed out here.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

MIN_PAUSE_SECONDS = 0.5
_PAUSE_OF_EACH_SECONDS = 0.025  # with 200 who listen 5 s: each asks for some answers after a hint
KEPT_EVENTS = 2_000


@dataclass(frozen=True, slots=True)
class Change:
    """One hint; `number` counts from 1 for the life of the server."""

    number: int
    topic: str
    changed: tuple[str, ...]
    step: int | None
    time_ms: float


class _Pending(dict[str, tuple[set[str], int | None]]):
    """Changes that wait, merged by topic: what changed, and the newest step that is known."""

    def add(self, topic: str, changed: set[str] | frozenset[str], step: int | None) -> None:
        before, step_before = self.get(topic, (set(), None))
        self[topic] = (before | changed, step if step is not None else step_before)


class Broker:
    """Merges changes per topic and hands them to subscribers."""

    def __init__(self) -> None:
        self.epoch = secrets.token_hex(4)  # ids of another server life mean nothing here
        self._lock = threading.Lock()
        self._pending = _Pending()
        self._to_relay = _Pending()
        self.relay: Callable[[str, tuple[str, ...], int | None], None] | None = None
        self._sent: dict[str, float] = {}
        self._events: deque[Change] = deque(maxlen=KEPT_EVENTS)
        self._number = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self.closed = False
        self.subscribers = 0

    async def start(self) -> None:
        """Begin to hand out; call in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._tick())

    def publish(self, topic: str, changed: set[str] | frozenset[str], step: int | None) -> None:
        """Say that something changed; from any thread."""
        if not changed:
            return
        with self._lock:
            self._pending.add(topic, changed, step)
            if self.relay is not None:
                self._to_relay.add(topic, changed, step)

    def relayed(self, topic: str, changed: tuple[str, ...], step: int | None) -> None:
        """Hand out what another process published; from any thread."""
        with self._lock:
            self._pending.add(topic, set(changed), step)

    def missed(self) -> None:
        """Take note that hints of others may be lost: who listens asks for everything anew."""
        self.epoch = secrets.token_hex(4)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._awake)

    def close(self) -> None:
        """End every stream; from any thread, also from a signal handler."""
        self.closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._awake)

    async def stop(self) -> None:
        """End the task that hands out."""
        self.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def pause_seconds(self) -> float:
        """Return the least pause between two hints of a topic."""
        return max(MIN_PAUSE_SECONDS, _PAUSE_OF_EACH_SECONDS * self.subscribers)

    def hinted_at(self, topic: str) -> float:
        """Return when the last hint of a topic went out, on the monotonic clock; 0 for none."""
        return self._sent.get(topic, 0.0)

    @property
    def last(self) -> int:
        """Return the number of the newest change."""
        return self._number

    def resume_point(self, last_event_id: str | None) -> int | None:
        """Return the number to go on from, or None where it is too old or foreign."""
        if not last_event_id:
            return self._number
        epoch, _, number = last_event_id.partition("-")
        if epoch != self.epoch or not number.isdigit():
            return None
        oldest = self._events[0].number if self._events else self._number + 1
        point = int(number)
        return point if oldest - 1 <= point <= self._number else None

    def since(self, number: int, topics: frozenset[str]) -> list[Change]:
        """Return the changes after `number` on `topics`; `*` stands for all."""
        return [
            event
            for event in self._events
            if event.number > number and ("*" in topics or event.topic in topics)
        ]

    async def wait(self, seconds: float) -> bool:
        """Wait for a change or the end; return False where `seconds` passed without."""
        if self._wake is None or self.closed:
            return True
        wake = self._wake
        try:
            await asyncio.wait_for(wake.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(MIN_PAUSE_SECONDS / 4)
            self._flush(time.monotonic())

    def _flush(self, now: float) -> None:
        with self._lock:
            topics = [
                topic
                for topic in self._pending
                if now - self._sent.get(topic, 0.0) >= self.pause_seconds
            ]
            due = {topic: self._pending.pop(topic) for topic in topics}
            ours = {topic: self._to_relay.pop(topic) for topic in topics if topic in self._to_relay}
        for topic, (changed, step) in ours.items():
            if self.relay is not None:
                self.relay(topic, tuple(sorted(changed)), step)
        for topic, (changed, step) in due.items():
            self._sent[topic] = now
            self._number += 1
            names = tuple(sorted(changed))
            self._events.append(Change(self._number, topic, names, step, time.time() * 1e3))
        if due:
            self._awake()

    def _awake(self) -> None:
        if self._wake is not None:
            # Those who wait now hold the old event; the next wait takes the new one.
            self._wake.set()
            self._wake = asyncio.Event()


def encode(broker: Broker, change: Change) -> bytes:
    """Return a change in the form of server-sent events."""
    data = msgspec.json.encode(
        {
            "topic": change.topic,
            "changed": change.changed,
            "step": change.step,
            "time_ms": change.time_ms,
        }
    )
    identity = f"{broker.epoch}-{change.number}".encode()
    return b"id: " + identity + b"\nevent: change\ndata: " + data + b"\n\n"
