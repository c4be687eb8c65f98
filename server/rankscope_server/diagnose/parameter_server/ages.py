"""How old gradients were when they were applied, in versions of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rankscope_server.findings.statistics import Array


@dataclass(frozen=True, slots=True)
class Ages:
    """Ages of one rank's gradients, exact counts; arrays of one length, in the order of steps."""

    steps: Array
    ages: Array
    mismatches: int  # gradients whose backward used other weights than their forward

    @property
    def p50(self) -> int:
        """Return the age that half of them do not exceed."""
        return self._quantile(0.50)

    @property
    def p95(self) -> int:
        """Return the age that 95 % of them do not exceed."""
        return self._quantile(0.95)

    @property
    def most(self) -> int:
        """Return the largest age."""
        return int(self.ages.max())

    @property
    def mean(self) -> float:
        """Return the mean age."""
        return float(self.ages.mean())

    def _quantile(self, share: float) -> int:
        return int(np.quantile(self.ages, share, method="inverted_cdf"))


def ages_of(rows: Mapping[int, tuple[int, int, int]]) -> Ages | None:
    """Return the ages of gradients; `rows` are by step (read, backward, applied), -1 not given.

    None where no gradient has both versions.
    """
    steps = np.array(sorted(rows), np.int64)
    values = np.array([rows[int(step)] for step in steps]).reshape(-1, 3)
    both = (values[:, 0] >= 0) & (values[:, 2] >= 0)
    if not both.any():
        return None
    read, backward, applied = values[both].T
    return Ages(steps[both], applied - read, int(np.sum((backward >= 0) & (backward != read))))
