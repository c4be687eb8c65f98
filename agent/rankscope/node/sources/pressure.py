"""Pressure stall information: time in which tasks waited for processor, memory or disk."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from rankscope.node.sources.base import Lane, Row, Source
from rankscope.node.sources.files import need, read_or_none
from rankscope.node.sources.machine import Machine
from rankscope.wire.schema import ChunkKind

# `full` of the processor says nothing for a whole machine
_WANTED = (("cpu", "some"), ("memory", "some"), ("memory", "full"), ("io", "some"), ("io", "full"))


class PressureSource(Source):
    """Time in which some or all tasks waited for processor, memory or disk."""

    name: ClassVar[str] = "pressure"
    kind: ClassVar[ChunkKind | None] = "pressure"
    lane: ClassVar[Lane] = "kernel"
    every: ClassVar[int] = 1

    def __init__(self, machine: Machine) -> None:
        self._directory = machine.proc / "pressure"

    def open(self) -> None:
        """Raise Skipped where the kernel does not count it."""
        need(self._directory / "cpu", "the kernel is older than 4.20 or was started without psi=1")

    def sample(self) -> Iterable[Row]:
        """Return one row."""
        texts = {
            name: read_or_none(self._directory / name) or "" for name in ("cpu", "memory", "io")
        }
        row: dict[str, float | str] = {}
        for name, kind in _WANTED:
            for line in texts[name].splitlines():
                first, *rest = line.split()
                totals = [word[6:] for word in rest if word.startswith("total=")]
                if first == kind and totals:
                    row[f"{name}_{kind}_us_total"] = int(totals[0])
        return [row]
