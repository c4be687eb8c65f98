"""What is kept of a run to compare later ones with it: step times by phase, and versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import erfc, sqrt

import numpy as np

from rankscope_server.findings.statistics import Array

PHASES: tuple[str, ...] = ("data", "forward", "backward", "optimizer", "other", "blocked")
MAX_TIMES = 512


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The steady steps of a run: medians in ms, a sample of step times, what it ran on.

    Runs are compared if they have the same `key`: command, world size and hardware. Versions stay
    outside it, they are what may explain a difference.
    """

    run_id: str
    key: tuple[str, ...]
    step_ms: float
    phases_ms: Mapping[str, float]
    times_ms: Array
    facts: Mapping[str, str] = field(default_factory=dict)
    tokens: float | None = None  # of all ranks in a step


def mann_whitney_p(first: Array, second: Array) -> float:
    """Return the one-sided p that `second` is no larger than `first` (Mann & Whitney 1947).

    The normal approximation with the correction for ties; both need a dozen values.
    """
    both = np.concatenate([first, second])
    values, places, counts = np.unique(both, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    n, m = len(first), len(second)
    score = float(ranks[n:].sum() - m * (m + 1) / 2)
    ties = float(np.sum(counts.astype(float) ** 3 - counts))
    total = n + m
    variance = n * m / 12 * (total + 1 - ties / (total * (total - 1)))
    if variance <= 0 or len(values) < 2:
        return 1.0

    return 0.5 * erfc((score - n * m / 2 - 0.5) / sqrt(variance) / sqrt(2.0))
