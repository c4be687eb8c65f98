"""Counts what was recognised, one row per meaning, in memory that does not grow with the logs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rankscope_server.known_errors.entry import KnownError, Role

MAX_GROUPS = 2_000  # of lines that no entry knows; what comes after is counted as one
MAX_VALUES = 64
MAX_SOURCES = 10_000
_MAX_SIGNAL = 8_000


@dataclass(slots=True)
class Group:
    """All lines that mean the same."""

    key: str  # the entry's id, or "?" and the template
    role: Role | None  # None: a line that says it is an error, and no more
    family: str
    strength: int
    signal: str  # the first such line as it is
    first: tuple[int, int]  # number of the source, place in it: order within one source only
    entry: KnownError | None = None
    why_grouped: str = ""
    what: str = ""  # of an exception: its last line
    count: int = 0
    ranks: set[int] = field(default_factory=set)
    culprits: set[int] = field(default_factory=set)
    sources: set[int] = field(default_factory=set)
    values: dict[str, tuple[str, int | None]] = field(default_factory=dict)  # first line, rank
    value_counts: dict[str, int] = field(default_factory=dict)


class Tally:
    """The groups of one reading."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}
        self.sources: list[str] = []
        self.num_lines_seen = 0  # that the first filter let through
        self.num_ungrouped = 0
        self.ranks: set[int] = set()  # that were heard of, by name of file or prefix of line

    def begin_source(self, name: str) -> int:
        """Return the number of a new source."""
        self.sources.append(name)
        return len(self.sources) - 1

    def add(self, group: Group, rank: int | None, culprit: int | None, value: str | None) -> None:
        """Count one line. `group` holds what a new row begins with."""
        known = self.groups.get(group.key)
        if known is None:
            if group.entry is None and len(self.groups) >= MAX_GROUPS:
                self.num_ungrouped += 1
                return
            group.signal = group.signal[:_MAX_SIGNAL]
            known = self.groups[group.key] = group
        known.count += 1
        if len(known.sources) < MAX_SOURCES:
            known.sources.add(group.first[0])
        if rank is not None:
            known.ranks.add(rank)
            self.ranks.add(rank)
        if culprit is not None:
            known.culprits.add(culprit)
        if value is not None and (value in known.values or len(known.values) < MAX_VALUES):
            known.values.setdefault(value, (group.signal[:_MAX_SIGNAL], rank))
            known.value_counts[value] = known.value_counts.get(value, 0) + 1

    def has(self, names: Iterable[str]) -> bool:
        """Return whether a line of one of these entries was seen."""
        return any(name in self.groups for name in names)
