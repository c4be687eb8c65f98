"""Versions of parameters at which gradients were read and applied, counted exactly.

Nothing in a script is hooked for this: a parameter server or a pipeline gives the numbers itself,
`rankscope.log_metrics(step, version_read=..., version_applied=...)`, once per gradient.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_MAX_STEPS = 2048  # of one rank
_MAX_SHARDS = 4096
_MAX_VALUE = float(1 << 53)  # neither NaN nor infinite, and a whole number stays one
_SHARD = re.compile(r"shard_(\d+)_(requests|bytes|queue_seconds|busy_seconds)$")
NAMES: tuple[str, ...] = ("version_read", "version_backward", "version_applied")
BOUND = "staleness_bound"  # -1 asynchronous, 0 synchronous, else the bound of SSP


@dataclass(slots=True)
class Shard:
    """Largest totals that any rank reported of one shard, and the sum over ranks that report."""

    by_rank: dict[tuple[int, str], float] = field(default_factory=dict)

    def total(self, what: str) -> float | None:
        """Return the sum over ranks, None where no rank reported."""
        found = [value for (_, name), value in self.by_rank.items() if name == what]
        return sum(found) if found else None


class VersionTable:
    """By rank and step: (read, backward, applied); -1 where not given."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[int, tuple[int, int, int]]] = {}
        self.bound: dict[int, int] = {}
        self.shards: dict[int, Shard] = {}

    @property
    def servers(self) -> frozenset[int]:
        """Return the ranks that report what they do for others."""
        return frozenset(rank for shard in self.shards.values() for rank, _ in shard.by_rank)

    def put(self, rank: int, step: int, values: Mapping[str, float]) -> None:
        """Take the versions of one gradient, and totals of shards."""
        values = {name: value for name, value in values.items() if abs(value) < _MAX_VALUE}
        given = [int(values.get(name, -1)) for name in NAMES]
        if max(given) >= 0:
            rows = self.rows.setdefault(rank, {})
            old = rows.get(step, (-1, -1, -1))
            rows[step] = (
                max(old[0], given[0]), max(old[1], given[1]), max(old[2], given[2]),
            )  # fmt: skip
            if len(rows) > _MAX_STEPS:
                del rows[min(rows)]
        if BOUND in values:
            self.bound[rank] = max(int(values[BOUND]), self.bound.get(rank, -1))
        for name, value in values.items():
            found = _SHARD.match(name)
            if found is not None and (len(self.shards) < _MAX_SHARDS):
                shard = self.shards.setdefault(int(found[1]), Shard())
                key = (rank, found[2])
                shard.by_rank[key] = max(value, shard.by_rank.get(key, 0.0))
