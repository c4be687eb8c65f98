"""The reference of the map: how each rank's own work compares, step by step.

Ranks with at least `MIN_PEERS` of their role are compared with the median of that role in the
same step; others with their own median over early healthy steps.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Reference: TypeAlias = Literal["peers", "own"]
Matrix: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ratios:
    """Own work over its reference, ranks x steps, NaN where either is not known."""

    ratio: Matrix
    reference: Matrix  # in the unit of the own work, same shape
    kinds: tuple[Reference, ...]  # per rank


def ratios(own_work: Matrix, roles: Sequence[Hashable], early: Matrix | None = None) -> Ratios:
    """Return each cell's ratio to its reference.

    `own_work` is ranks x steps (any unit, NaN missing), `roles` one per rank. `early` holds the
    steps that serve as a rank's own reference, ranks x any steps; None: the first of `own_work`.
    """
    raise NotImplementedError
