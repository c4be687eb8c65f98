"""Numbers of training by name, step and rank: the first and the newest steps.

Numbers may come in any order and any number of times; of two values of one rank for one step the
larger counts, so that every order leads to the same table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rankscope.wire.metric_names import ALTERNATING, NONFINITE

Vector: TypeAlias = NDArray[np.float64]
_FIRST_ROWS = 8
HEAD = 48  # first steps, kept for ever: a rank's own reference
_MAX_FLAG_STEPS = 512
# name -> how many of the newest steps are kept
CAPACITY: dict[str, int] = {
    "loss": 512,
    "gradient_norm": 512,
    "gradient_norm_local": 512,
    "samples": 512,
    "tokens": 512,
    "replica_checksum": 64,
    "learning_rate": 512,
    "corrupt_batches": 512,
}
FLAGS = frozenset(NONFINITE.values())


@dataclass(slots=True)
class Flagged:
    """Steps in which a rank flagged a number as NaN or infinite; the newest are kept."""

    first_step: int
    first_ns: int
    steps: set[int] = field(default_factory=set)
    last_finite_step: int = -1


class NumberTable:
    """`column(name, step)[row_of[rank]]`, NaN where not known."""

    def __init__(self) -> None:
        self.row_of: dict[int, int] = {}
        self.flagged: dict[tuple[str, int], Flagged] = {}  # flag, rank
        self.num_parameters: dict[int, float] = {}
        self.alternates = False  # networks train in turn, each on a loss of its own
        self._columns: dict[str, dict[int, Vector]] = {name: {} for name in CAPACITY}
        self._typical: dict[str, dict[int, tuple[float, int]]] = {name: {} for name in CAPACITY}
        self._finite: dict[tuple[str, int], int] = {}

    # --- writing -----------------------------------------------------------------------------

    def put(self, rank: int, step: int, time_ns: int, values: Mapping[str, float]) -> None:
        """Take numbers of one rank for one step."""
        row = self.row_of.setdefault(rank, len(self.row_of))
        for name, value in values.items():
            if name in NONFINITE:  # a script may report the number without the flag
                self._flag(NONFINITE[name], rank, step, time_ns, float(not math.isfinite(value)))
            if name in FLAGS:
                self._flag(name, rank, step, time_ns, value)
            elif name in self._columns and math.isfinite(value):
                self._put(name, step, row, value)
            elif name == ALTERNATING:
                self.alternates |= value > 0
            elif name == "parameters" and math.isfinite(value):
                self.num_parameters[rank] = max(value, self.num_parameters.get(rank, 0.0))

    def _put(self, name: str, step: int, row: int, value: float) -> None:
        columns = self._columns[name]
        column = columns.get(step)
        if column is None:
            column = columns[step] = np.full(max(_FIRST_ROWS, len(self.row_of)), np.nan)
            if len(columns) > CAPACITY[name] + HEAD:
                dropped = sorted(columns)[HEAD]
                del columns[dropped]
                self._typical[name].pop(dropped, None)
                if dropped == step:
                    return
        if row >= len(column):
            size = max(2 * len(column), len(self.row_of))
            grown = np.full(size, np.nan)
            grown[: len(column)] = column
            column = columns[step] = grown
        if not column[row] >= value:
            column[row] = value
            self._typical[name].pop(step, None)

    def _flag(self, name: str, rank: int, step: int, time_ns: int, value: float) -> None:
        key = (name, rank)
        known = self.flagged.get(key)
        if not value > 0:
            self._finite[key] = max(step, self._finite.get(key, -1))
            if known is not None:
                known.last_finite_step = self._finite[key]
            return
        if known is None:
            known = self.flagged[key] = Flagged(step, time_ns)
            known.last_finite_step = self._finite.get(key, -1)
        known.first_step, known.first_ns = min((known.first_step, known.first_ns), (step, time_ns))
        known.steps.add(step)
        if len(known.steps) > _MAX_FLAG_STEPS:
            known.steps.discard(min(known.steps))

    # --- reading -----------------------------------------------------------------------------

    def steps(self, name: str) -> list[int]:
        """Return the newest steps of which a number is kept, ascending."""
        return sorted(self._columns[name])[-CAPACITY[name] :]

    def head(self, name: str) -> list[int]:
        """Return the first steps of an attempt of which a number is known, ascending."""
        return sorted(self._columns[name])[:HEAD]

    def column(self, name: str, step: int) -> Vector:
        """Return a number of one step by row; NaN where not known."""
        column = self._columns[name].get(step)
        found = np.full(len(self.row_of), np.nan)
        if column is not None:
            size = min(len(column), len(found))
            found[:size] = column[:size]
        return found

    def matrix(self, name: str, steps: list[int]) -> NDArray[Any]:
        """Return a number of some steps, rows x steps."""
        if not steps:
            return np.full((len(self.row_of), 0), np.nan)
        return np.stack([self.column(name, step) for step in steps], axis=1)

    def typical(self, name: str) -> tuple[NDArray[np.int64], Vector, NDArray[np.int64]]:
        """Return the steps of a number, its median over ranks in each, and of how many ranks.

        Only steps that changed since the last call are worked out.
        """
        known = self._typical[name]
        steps = self.steps(name)
        for step in steps:
            if step not in known:
                column = self._columns[name][step]
                values = column[~np.isnan(column)]
                known[step] = (float(np.median(values)), len(values))
        pairs = [known[step] for step in steps]
        return (
            np.array(steps, np.int64),
            np.array([pair[0] for pair in pairs], np.float64),
            np.array([pair[1] for pair in pairs], np.int64),
        )

    @property
    def has_finite(self) -> bool:
        """Return whether any rank ever said whether its numbers are finite."""
        return bool(self._finite or self.flagged)

    @property
    def ranks(self) -> list[int]:
        """Return the rank of each row."""
        return list(self.row_of)
