"""How often something may be done: buckets that fill up with time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

MAX_BUCKETS = 20_000


@dataclass(slots=True)
class _Bucket:
    level: float
    at_s: float


class Buckets:
    """One bucket for each key; full at first, so that a burst passes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    def wait_s(self, key: str, size: float, per_s: float, amount: float = 1.0) -> float:
        """Take `amount` and return 0, or take nothing and return the seconds until it is there."""
        bucket = self._filled(key, size, per_s)
        if bucket.level < amount:
            return (amount - bucket.level) / per_s
        bucket.level -= amount
        return 0.0

    def owed_s(self, key: str, size: float, per_s: float, amount: float = 0.0) -> float:
        """Take `amount` even where it is not there; return the seconds until nothing is owed."""
        bucket = self._filled(key, size, per_s)
        bucket.level -= amount
        return max(0.0, -bucket.level / per_s)

    def give_back(self, key: str, amount: float = 1.0) -> None:
        """Return what was taken for nothing."""
        bucket = self._buckets.get(key)
        if bucket is not None:
            bucket.level += amount

    def _filled(self, key: str, size: float, per_s: float) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.get(key)
        if bucket is None:
            self._make_room(now)
            bucket = self._buckets[key] = _Bucket(size, now)
        bucket.level = min(size, bucket.level + (now - bucket.at_s) * per_s)
        bucket.at_s = now
        return bucket

    def _make_room(self, now: float) -> None:
        """Forget the half that rested longest: those buckets are the fullest."""
        if len(self._buckets) < MAX_BUCKETS:
            return
        oldest = sorted(self._buckets, key=lambda key: self._buckets[key].at_s)
        for key in oldest[: MAX_BUCKETS // 2]:
            del self._buckets[key]
