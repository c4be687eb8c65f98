"""A source that gives what it is asked to; as a program, says how long the collector overslept."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import ClassVar

from rankscope.node.sources.base import Row, Skipped
from rankscope.node.sources.machine import Lane, Machine, SampleSource
from rankscope.node.sources.samples import LaneThread, Slot
from rankscope.wire.schema import ChunkKind


class Steady(SampleSource):
    """Gives the same row each time, or fails as it is asked to."""

    name: ClassVar[str] = "steady"
    kind: ClassVar[ChunkKind | None] = "tcp"
    lane: ClassVar[Lane] = "kernel"
    every: ClassVar[int] = 1

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.opened = 0
        self.closed = 0
        self.failure: Exception | None = None

    def open(self) -> None:
        self.opened += 1
        if isinstance(self.failure, Skipped):
            raise self.failure

    def sample(self) -> Iterable[Row]:
        if self.failure is not None:
            raise self.failure
        return [{"connections": 7}]

    def close(self) -> None:
        self.closed += 1


class Sleeper(Steady):
    """Writes how long the collector overslept."""

    def overslept(self, seconds: float) -> None:
        sys.stdout.write(f"{seconds}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    LaneThread("kernel", [Slot(Sleeper(Machine()), 0.5)]).run()
