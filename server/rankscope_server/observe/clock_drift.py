"""Whether a clock drifts away from those beside it."""

from __future__ import annotations

from collections.abc import Mapping
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


def drifts_of(leads_ms: Mapping[str, Array]) -> dict[str, Drift]:
    """Return how each clock drifts by its leads, oldest first.

    A clock that was set changes once; one that drifts in nearly every stretch, and one way. A
    change counts beyond four standard errors of the medians of both stretches.
    """
    found = dict.fromkeys(leads_ms, NONE)
    by_length: dict[int, list[str]] = {}
    for name, leads in leads_ms.items():
        if len(leads) >= _PARTS * _LEAST_OF_A_PART:
            by_length.setdefault(len(leads), []).append(name)
    for names in by_length.values():  # of one length, all at once: they are nearly always
        parts = np.array_split(np.array([leads_ms[name] for name in names]), _PARTS, axis=1)
        middles = np.array([np.median(part, axis=1) for part in parts])
        errors = np.array([
            SIGMA_PER_MAD * MEDIAN_SCATTER / np.sqrt(part.shape[1])
            * np.median(np.abs(part - middle[:, None]), axis=1)
            for part, middle in zip(parts, middles, strict=True)
        ])  # fmt: skip
        for name, middle, error in zip(names, middles.T, errors.T, strict=True):
            found[name] = _drift(middle, error)
    return found


def _drift(middle_ms: Array, error_ms: Array) -> Drift:
    """Return the drift by the medians of the stretches and their errors."""
    changes = np.diff(middle_ms)
    clear = changes[np.abs(changes) > 4 * np.hypot(error_ms[1:], error_ms[:-1])]
    if len(clear) < _PARTS - 2 or not (np.all(clear > 0) or np.all(clear < 0)):
        return NONE
    return Drift(float(np.median(clear)), float(middle_ms[-1]), 4 * float(error_ms[-1]))
