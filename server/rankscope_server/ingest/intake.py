"""What collectors send and is not stored yet, and since when: the server's own delay.

A batch is under way from the first byte of its request until it is stored. What has not come
through, or was put off because too much is in work, is no silence of the ranks it is about:
`delay_seconds` says how far back all is known. Where answers come too slowly batches wait at their
collectors, which say for how long (`waited`).
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# A batch that was put off comes again after the pause that it was asked for, some after a few.
COMES_AGAIN_SECONDS = 15.0
NEWEST_SECONDS = 30.0  # collectors that sent nothing for so long do not count
MOST_WAITED_SECONDS = 600.0  # that count: what is older comes of a node that was cut off, or lies


@dataclass(slots=True)
class Waiting:
    """One batch under way."""

    num_bytes: int
    since: float | None = None  # when its last byte came; until then the delay is its sender's


class _PutOff:
    """Batches that are put off again and again."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._last = 0.0

    def note(self, now: float) -> None:
        """Note that one was."""
        self._since, self._last = self.since(now) or now, now

    def since(self, now: float) -> float | None:
        """Return since when they are; None where none is now."""
        return None if now - self._last >= COMES_AGAIN_SECONDS else self._since


@dataclass(frozen=True, slots=True)
class _Waited:
    """What a collector said of its newest batch."""

    seconds: float
    at: float


class _Waits:
    """For how long batches have waited at their collectors."""

    def __init__(self) -> None:
        self._of_run: dict[str, dict[str, _Waited]] = {}  # by producer
        self._tidy_at = 0.0

    def note(self, run_id: str, producer: str, seconds: float, now: float) -> None:
        """Note it of one batch; forget what is no longer new."""
        counted = min(max(seconds, 0.0), MOST_WAITED_SECONDS)
        self._of_run.setdefault(run_id, {})[producer] = _Waited(counted, now)
        if now >= self._tidy_at:
            self._tidy_at = now + NEWEST_SECONDS
            newest = {run: self._newest(run, now) for run in self._of_run}
            self._of_run = {run: waits for run, waits in newest.items() if waits}

    def half(self, now: float, run_id: str | None = None) -> float:
        """Return how long they wait at half of the collectors or more, of one run or of all.

        One alone has a slow link.
        """
        runs = list(self._of_run) if run_id is None else [run_id]
        waits = [one.seconds for run in runs for one in self._newest(run, now).values()]
        return statistics.median_low(waits) if waits else 0.0

    def _newest(self, run_id: str, now: float) -> dict[str, _Waited]:
        said = self._of_run.get(run_id, {})
        return {name: one for name, one in said.items() if now - one.at < NEWEST_SECONDS}


class Intake:
    """Counts the bytes under way; used from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._under_way: dict[int, Waiting] = {}
        self._num_bytes = 0
        self._put_off, self._by_quota = _PutOff(), _PutOff()
        self._waits = _Waits()
        self.num_put_off = 0

    @property
    def num_bytes(self) -> int:
        """Return the bytes under way."""
        return self._num_bytes

    @property
    def num_batches(self) -> int:
        """Return the batches under way."""
        return len(self._under_way)

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

    def put_off(self, *, by_quota: bool = False) -> None:
        """Note that a batch was refused for now, and will come again.

        `by_quota`: its sender may not send more, however little this server has to do.
        """
        with self._lock:
            self.num_put_off += 1
            (self._by_quota if by_quota else self._put_off).note(self._clock())

    def waited(self, run_id: str, producer: str, seconds: float) -> None:
        """Note for how long a batch has waited at its collector."""
        with self._lock:
            self._waits.note(run_id, producer, seconds, self._clock())

    def received(self, waiting: Waiting) -> None:
        """Note that the whole of a batch is here."""
        waiting.since = self._clock()

    def delay_seconds(self, run_id: str = "") -> float:
        """Return for how long something that was sent has not been stored; 0 for nothing.

        Of a run with what waits at its collectors.
        """
        now = self._clock()
        with self._lock:
            since = (self._own_since(now), self._by_quota.since(now))
            oldest = min((at for at in since if at is not None), default=now)
            return max(now - oldest, self._waits.half(now, run_id))

    def own_delay_seconds(self) -> float:
        """Return how much of it is due to this server: all but quotas, and what waits anywhere."""
        now = self._clock()
        with self._lock:
            since = self._own_since(now)
            return max(0.0 if since is None else now - since, self._waits.half(now))

    def wait_seconds(self) -> float:
        """Return how long batches had waited in the spools of half of the collectors or more."""
        with self._lock:
            return self._waits.half(self._clock())

    def _own_since(self, now: float) -> float | None:
        began = [w.since for w in self._under_way.values() if w.since is not None]
        put_off = self._put_off.since(now)
        return min(began if put_off is None else [*began, put_off], default=None)
