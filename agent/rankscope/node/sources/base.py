"""What a source of samples is, and what it tells."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, TypeAlias

from rankscope.wire.schema import NODE_RANK, ChunkKind

if TYPE_CHECKING:
    from rankscope.node.sources.machine import Machine

# values by column name; a column that is not there was not told
Row: TypeAlias = Mapping[str, float | str]
# one thread each: a driver that hangs stops only its own lane
Lane: TypeAlias = Literal["kernel", "driver"]


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
    time_ns: int = 0  # 0: when it is told
    attempt: int = 0
    rank: int = NODE_RANK


class Source(Protocol):
    """One thing to sample; the class docstring is its help text. The constructor does nothing."""

    name: ClassVar[str]  # kebab-case: the id in `describe`, in events and on the page
    kind: ClassVar[ChunkKind | None]  # of its rows; None: it only tells news
    lane: ClassVar[Lane]
    every: ClassVar[int]  # sampled each so many intervals of the settings

    def __init__(self, machine: Machine) -> None: ...

    def open(self) -> None:
        """Find what is to be sampled. Raises Skipped where this machine has none."""

    def sample(self) -> Iterable[Row]:
        """Return rows without time_ns and interval_ns. Raises OSError, ValueError, Skipped."""

    def close(self) -> None:
        """Let go of what `open` took, if anything."""

    def overslept(self, seconds: float) -> None:
        """Learn that the sleep before the next sample lasted so much longer than it was meant to.

        Time without a free processor is not counted: the collector, and perhaps all of its machine,
        was paused.
        """


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
