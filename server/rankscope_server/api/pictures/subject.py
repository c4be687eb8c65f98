"""Whom a picture is about, who stands beside it, and what a part of it is made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from rankscope_server.api.pictures.schema import Part, PictureLimit
from rankscope_server.findings.finding import Level
from rankscope_server.retention.kinds import RawKind
from rankscope_server.text import plural

MAX_LINES = 3
MAX_OTHERS = 20  # ranks or hosts in the band, evenly chosen
BEFORE_STEPS, AFTER_STEPS = 60, 240
AROUND_NS = 150 * 10**9  # before and after an onset


@dataclass(frozen=True, slots=True)
class Subject:
    """Whom a finding names, and when it began."""

    run: sa.Row[Any]
    attempt: int
    kind: str
    name: str  # what its key says beside detector and attempt
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    group: str | None
    onset_step: int | None
    onset_ns: int | None
    last_step: int
    last_ns: int
    host_of: Mapping[int, str]
    role_of: Mapping[int, int]
    levels: tuple[Level, ...]
    what: str
    words: str  # all that it says

    @property
    def run_id(self) -> str:
        """Return the id of its run."""
        return str(self.run.run_id)

    def others(self) -> list[int]:
        """Return some of the ranks that it does not name."""
        return evenly([rank for rank in self.host_of if rank not in set(self.ranks)])

    def peers(self) -> list[int]:
        """Return all ranks that it does not name and that have the role of those it names."""
        roles = {self.role_of[rank] for rank in self.ranks if rank in self.role_of}
        return [
            rank for rank in self.host_of
            if rank not in set(self.ranks) and (not roles or self.role_of[rank] in roles)
        ]  # fmt: skip

    def limits(self, chart: str) -> list[PictureLimit]:
        """Return the lines that the detector asks for in a chart."""
        return [
            PictureLimit(label=one.label, value=one.value)
            for one in self.levels if one.chart == chart
        ]  # fmt: skip

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


Maker = Callable[[sa.Connection, Subject], Sequence[Part]]


@dataclass(frozen=True, slots=True)
class Source:
    """What makes some parts of a picture, what is not stored where it makes none, of which kind."""

    make: Maker
    lacks: str
    kind: RawKind | None = None  # that retention may have removed


def evenly(items: list[Any], most: int = MAX_OTHERS) -> list[Any]:
    """Return at most so many of them, spread over all."""
    ordered = sorted(items)
    if len(ordered) <= most:
        return ordered
    return [ordered[place * len(ordered) // most] for place in range(most)]


def others_text(shown: int, total: int, noun: str) -> str:
    """Return "20 of the 63 other ranks", "the 7 other ranks"."""
    if shown < total:
        return f"{shown:,} of the {plural(total, 'other ' + noun)}"
    return f"the {plural(shown, 'other ' + noun)}" if shown > 1 else f"the other {noun}"
