"""What the steps of a window consist of, step by step: one series for each part. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from rankscope_server.findings.statistics import Array, median
from rankscope_server.verdict.budget import PARTS, split

Series: TypeAlias = dict[str, Array]  # by part; one value a step, NaN where it is not known
STEP = "step"
LABELS: dict[str, str] = {
    "data": "waiting for data",
    "forward": "forward",
    "backward": "backward",
    "communication": "exposed communication",
    "waiting": "waiting for other ranks",
    "optimizer": "optimizer",
    "checkpoint": "checkpoint",
    "other": "time outside phases",
}
_BINS = 48
_SHOWN_SHARE = 99.0  # percent of the steps of both that the bins hold; rare long ones are counted


def series_of(planes: Mapping[str, Array], roles: Sequence[Hashable]) -> Series:
    """Return the time of each step, and its parts, in ms; `planes` are ranks x steps.

    A step is as long as its slowest rank takes. Its parts are those of the rank that worked
    longest in it, for which all others wait: what became longer there made the step longer.
    Where waits are not known no part is.
    """
    steps = planes["step"].shape[1]
    nothing = np.full(steps, np.nan)
    if not len(planes["step"]) or not steps:
        return {STEP: nothing} | dict.fromkeys(PARTS, nothing)
    found: Series = {STEP: np.fmax.reduce(planes["step"], axis=0).astype(np.float64)}
    parts = split(planes, roles)
    own = planes["step"] - planes["blocked"]
    known = ~np.isnan(own)
    row = np.argmax(np.where(known, own, -np.inf), axis=0)
    at = np.arange(steps)
    is_known = known[row, at]
    for name in PARTS:
        found[name] = np.where(is_known, parts[name][row, at], np.nan).astype(np.float64)
    return found


@dataclass(frozen=True, slots=True)
class Course:
    """Two windows side by side from their first steps on, in bins of steps; NaN: none is known."""

    bin: int
    before: Array  # least, median and largest time of each bin, ms
    after: Array


def course(before: Array, after: Array, bin: int) -> Course:
    """Return the step times of two windows, aligned at their first steps."""
    columns = -(-max(len(before), len(after), 1) // bin)
    return Course(bin, _binned(before, bin, columns), _binned(after, bin, columns))


def _binned(values: Array, bin: int, columns: int) -> Array:
    padded = np.full(bin * columns, np.nan)
    padded[: len(values)] = values
    cells = padded.reshape(columns, bin)
    least, most = np.fmin.reduce(cells, axis=1), np.fmax.reduce(cells, axis=1)
    return np.stack([least, median(cells), most])


@dataclass(frozen=True, slots=True)
class Distribution:
    """How many steps of each window fall between two edges, and how many took longer than all."""

    edges_ms: Array
    before: Array
    after: Array
    before_beyond: int
    after_beyond: int


def distribution(before: Array, after: Array) -> Distribution:
    """Return the step times of two windows in bins that both share; empty where one has none."""
    windows = [values[~np.isnan(values)] for values in (before, after)]
    if not all(len(values) for values in windows):
        return Distribution(np.zeros(0), np.zeros(0, int), np.zeros(0, int), 0, 0)
    low = min(float(values.min()) for values in windows)
    high = max(float(np.percentile(values, _SHOWN_SHARE)) for values in windows)
    edges = np.linspace(low, max(high, low + 1e-3), _BINS + 1)
    counts = [np.histogram(values, edges)[0] for values in windows]
    beyond = [int((values > edges[-1]).sum()) for values in windows]
    return Distribution(edges, counts[0], counts[1], beyond[0], beyond[1])
