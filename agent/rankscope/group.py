"""One process group as a rank records it: its name, its members, its counters."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Group:
    """One process group of this process, and its counters."""

    index: int
    name: str
    ranks: list[int]  # global ranks in group order
    reference: weakref.ref[Any]
    sequence: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    p2p: dict[tuple[int, int], itertools.count[int]] = field(default_factory=dict)

    @property
    def issued(self) -> int:
        """Number of collectives so far."""
        return int(repr(self.sequence)[len("count(") : -1]) - 1  # there is no other way to look

    def go_on_after(self, issued: int) -> None:
        """Continue behind so many collectives."""
        self.sequence = itertools.count(issued + 1)

    def next_p2p(self, operation: int, peer: int) -> int:
        """Return the next number between this rank and `peer` in one direction."""
        return next(self.p2p.setdefault((operation, peer), itertools.count(1)))
