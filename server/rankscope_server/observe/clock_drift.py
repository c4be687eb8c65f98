"""Whether a clock drifts away from those beside it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rankscope.wire.formulas import MEDIAN_SCATTER, SIGMA_PER_MAD
from rankscope_server.findings.statistics import Array

_LEAST_OF_A_PART = 6
_PARTS = 5  # stretches of the operations kept in which a drift must show


class Drift(NamedTuple):
    """By how much a clock's lead changes from stretch to stretch, None unless it drifts."""

    change_ms: float | None
    lead_ms: float  # of the last stretch
    band_ms: float  # of that


NONE = Drift(None, 0.0, 0.0)


def drift_of(lead_ms: Array) -> Drift:
    """Return how a clock drifts by its leads, oldest first.

    A clock that was set changes once; one that drifts in nearly every stretch, and one way. A
    change counts beyond four standard errors of the medians of both stretches.
    """
    if len(lead_ms) < _PARTS * _LEAST_OF_A_PART:
        return NONE
    parts = np.array_split(lead_ms, _PARTS)
    middle = np.array([np.median(part) for part in parts])
    error = np.array([
        SIGMA_PER_MAD * MEDIAN_SCATTER * np.median(np.abs(part - np.median(part)))
        / np.sqrt(len(part)) for part in parts
    ])  # fmt: skip
    changes = np.diff(middle)
    clear = changes[np.abs(changes) > 4 * np.hypot(error[1:], error[:-1])]
    if len(clear) < _PARTS - 2 or not (np.all(clear > 0) or np.all(clear < 0)):
        return NONE
    return Drift(float(np.median(clear)), float(middle[-1]), 4 * float(error[-1]))
