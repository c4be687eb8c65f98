"""What collectors send and is not stored yet, and since when: the server's own delay.

A batch is under way from the first byte of its request until it is stored. What has not come
through, or was put off because too much is in work, is no silence of the ranks it is about:
`delay_seconds` says how far back all is known.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# A batch that was put off comes again after the pause that it was asked for, some after a few.
COMES_AGAIN_SECONDS = 15.0


@dataclass(slots=True)
class Waiting:
    """One batch under way."""

    num_bytes: int
    since: float | None = None  # when its last byte came; until then the delay is its sender's


class Intake:
    """Counts the bytes under way; used from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._under_way: dict[int, Waiting] = {}
        self._num_bytes = 0
        self._put_off: tuple[float, float] | None = None  # first and last time that one was
        self.num_put_off = 0

    @property
    def num_bytes(self) -> int:
        """Return the bytes under way."""
        return self._num_bytes

    @contextmanager
    def under_way(self, num_bytes: int) -> Iterator[Waiting]:
        """Count a batch while it is worked on."""
        with self._lock:
            number = next(self._numbers)
            waiting = self._under_way[number] = Waiting(num_bytes)
            self._num_bytes += num_bytes
        try:
            yield waiting
        finally:
            with self._lock:
                del self._under_way[number]
                self._num_bytes -= num_bytes

    def put_off(self) -> None:
        """Note that a batch was refused for now, and will come again."""
        now = self._clock()
        with self._lock:
            self.num_put_off += 1
            since = self._put_off_since(now)
            self._put_off = (now if since is None else since, now)

    def received(self, waiting: Waiting) -> None:
        """Note that the whole of a batch is here."""
        waiting.since = self._clock()

    def delay_seconds(self) -> float:
        """Return for how long something that was sent has not been stored; 0 for nothing."""
        now = self._clock()
        with self._lock:
            began = [w.since for w in self._under_way.values() if w.since is not None]
            since = min(began, default=now)
            put_off = self._put_off_since(now)
            return now - (since if put_off is None else min(since, put_off))

    def _put_off_since(self, now: float) -> float | None:
        """Return since when batches are put off again and again; None where none is now."""
        if self._put_off is None or now - self._put_off[1] >= COMES_AGAIN_SECONDS:
            return None
        return self._put_off[0]
