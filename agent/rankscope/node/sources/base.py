"""What all sources of samples use: rows, news, and why there are none."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from rankscope.wire.schema import NODE_RANK

# values by column name; a column that is not there is not known
Row: TypeAlias = Mapping[str, float | str]


class Skipped(RuntimeError):
    """This machine has no such source; the message says why, for people."""


@dataclass(frozen=True)
class RankProcess:
    """A live training process of this node whose pid can be seen."""

    attempt: int
    rank: int
    pid: int
    thread: int = field(default=0, compare=False)  # native id of the one that trains, 0: the main


@dataclass(frozen=True)
class News:
    """Something that a source saw happen once; becomes a schema.Event of the node."""

    name: str
    fields: dict[str, str]
    time_ns: int = 0  # 0: when it is reported
    attempt: int = 0
    rank: int = NODE_RANK


class Limiter:
    """Lets at most `most` pass in each span of `seconds`, and counts the others."""

    def __init__(
        self, most: int, seconds: float, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._most, self._seconds, self._monotonic = most, seconds, monotonic
        self._since = monotonic()
        self._passed = 0
        self.suppressed = 0  # since the last that passed

    def passes(self) -> bool:
        """Return whether one more may pass now."""
        now = self._monotonic()
        if now - self._since >= self._seconds:
            self._since, self._passed = now, 0
        if self._passed >= self._most:
            self.suppressed += 1
            return False
        self._passed += 1
        return True

    def take_suppressed(self) -> int:
        """Return how many did not pass since this was last asked."""
        suppressed, self.suppressed = self.suppressed, 0
        return suppressed
