"""How many log records are kept: enough of everything, however loud one place of the script is.

Two limits hold at once. Records that look alike (same logger, level and template) share a bucket;
all records below ERROR share a second one, and all from ERROR up a third, so that no flood of
less costs an error. What is suppressed is counted and reported.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

ALIKE_BURST, ALIKE_PER_SECOND = 1000, 100
BURST, PER_SECOND = 5000, 1000  # below ERROR
ERROR_BURST, ERRORS_PER_SECOND = 1000, 200
MAX_TEMPLATES = 2000
_MAX_TEMPLATE = 200
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


class Bucket:
    """A token bucket: `burst` at once, then `per_second`."""

    __slots__ = ("_at", "_burst", "_per_second", "_tokens")

    def __init__(self, burst: float, per_second: float, now: float) -> None:
        self._burst, self._per_second = burst, per_second
        self._tokens, self._at = burst, now

    def has(self, now: float, amount: float = 1.0) -> bool:
        """Return whether there are so many tokens."""
        gained = (now - self._at) * self._per_second
        self._tokens, self._at = min(self._burst, self._tokens + gained), now
        return self._tokens >= amount

    def take(self, now: float, amount: float = 1.0) -> bool:
        """Take tokens if there are enough."""
        if not self.has(now, amount):
            return False
        self._tokens -= amount
        return True


@dataclass
class Alike:
    """Records that look alike, and how many of them were suppressed since the last report."""

    logger: str
    level: int
    template: str
    bucket: Bucket
    suppressed: int = 0


class Limiter:
    """Decides which records are kept. Used without a lock: a race costs a token or a count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        now = clock()
        self._clock = clock
        self._below_error = Bucket(BURST, PER_SECOND, now)
        self._errors = Bucket(ERROR_BURST, ERRORS_PER_SECOND, now)
        self._alike: dict[tuple[str, int, str], Alike] = {}

    def admit(self, logger: str, level: int, template: str) -> bool:
        """Return whether a record is kept; one that is not is counted."""
        now = self._clock()
        alike = self._find(logger, level, template[:_MAX_TEMPLATE], now)
        of_all = self._errors if level >= logging.ERROR else self._below_error
        if alike.bucket.take(now) and of_all.take(now):
            return True
        alike.suppressed += 1
        return False

    def take_suppressed(self) -> list[Alike]:
        """Return what was suppressed since the last call, with its counts."""
        found = []
        for alike in list(self._alike.values()):
            if alike.suppressed:
                found.append(replace(alike))
                alike.suppressed = 0
        return found

    def _find(self, logger: str, level: int, template: str, now: float) -> Alike:
        key = (logger, level, template)
        alike = self._alike.get(key)
        if alike is None:
            if len(self._alike) >= MAX_TEMPLATES:
                self._forget()
            bucket = Bucket(ALIKE_BURST, ALIKE_PER_SECOND, now)
            alike = self._alike[key] = Alike(logger, level, template, bucket)
        return alike

    def _forget(self) -> None:
        """Forget the older half, but for what has a count to report."""
        for key in list(self._alike)[: MAX_TEMPLATES // 2]:
            alike = self._alike.get(key)
            if alike is not None and not alike.suppressed:
                del self._alike[key]
        if len(self._alike) >= MAX_TEMPLATES:
            self._alike.clear()


def template_of(message: object, has_arguments: bool) -> str:
    """Return what messages of one place have in common: the format, or the text without numbers."""
    if not isinstance(message, str):
        return type(message).__qualname__
    return message if has_arguments else _NUMBER.sub("#", message[:_MAX_TEMPLATE])
