"""Whom a picture is about, and who stands beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from rankscope_server.api.pictures.schema import FindingChart
from rankscope_server.text import plural

MAX_LINES = 3
MAX_OTHERS = 20  # ranks or hosts in the band, evenly chosen
BEFORE_STEPS, AFTER_STEPS = 60, 240
AROUND_NS = 150 * 10**9  # before and after an onset


@dataclass(frozen=True, slots=True)
class Subject:
    """Whom a finding names, and when it began."""

    run_id: str
    attempt: int
    kind: str
    name: str  # what its key says beside detector and attempt
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    onset_step: int | None
    onset_ns: int | None
    last_step: int
    last_ns: int
    host_of: Mapping[int, str]

    def others(self) -> list[int]:
        """Return some of the ranks that it does not name."""
        return evenly([rank for rank in self.host_of if rank not in set(self.ranks)])

    def steps(self, *, whole: bool = False) -> tuple[int, int]:
        """Return the steps around the onset, or all of them."""
        if whole or self.onset_step is None:
            return 1, self.last_step
        last = min(self.last_step, self.onset_step + AFTER_STEPS)
        return max(1, self.onset_step - BEFORE_STEPS), last

    def between(self) -> tuple[int, int]:
        """Return the time around the onset; without one the newest."""
        if self.onset_ns is None:
            return self.last_ns - 2 * AROUND_NS, self.last_ns
        return self.onset_ns - AROUND_NS, self.onset_ns + AROUND_NS


Maker = Callable[[sa.Connection, Subject], list[FindingChart]]


def evenly(items: list[Any]) -> list[Any]:
    """Return at most so many of them, spread over all."""
    ordered = sorted(items)
    if len(ordered) <= MAX_OTHERS:
        return ordered
    return [ordered[place * len(ordered) // MAX_OTHERS] for place in range(MAX_OTHERS)]


def others_text(shown: int, total: int, noun: str) -> str:
    """Return "20 of the 63 other ranks", "the 7 other ranks"."""
    if shown < total:
        return f"{shown:,} of the {plural(total, 'other ' + noun)}"
    return f"the {plural(shown, 'other ' + noun)}" if shown > 1 else f"the other {noun}"
