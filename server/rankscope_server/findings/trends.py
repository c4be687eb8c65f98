"""Does a series grow, since when, how fast, and when does it reach a limit? Without noise
when does it reach a limit? Without noise
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rankscope.wire.formulas import SIGMA_PER_MAD
from rankscope_server.findings.statistics import Array

MAX_POINTS = 64  # of a series that are looked at: pairs grow with their square
_Z_90 = 1.645
_MIN_JUMPS = 4  # three of a high-water mark are even by chance now and then


@dataclass(frozen=True, slots=True)
class Trend:
    """A series that grows. Slopes are per step."""

    slope: float
    low: float  # 90 % interval of the slope
    high: float
    onset: int  # step from which it grows
    span: int  # steps over which it was seen to grow
    sigma: float  # of the residuals
    is_staircase: bool = False
    every: int = 0  # steps between the jumps of a staircase


def thin(steps: Array, values: Array, count: int = MAX_POINTS) -> tuple[Array, Array]:
    """Return at most `count` points, evenly spread, the last one among them."""
    if len(steps) <= count:
        return steps, values
    at = np.unique(np.linspace(0, len(steps) - 1, count).round().astype(int))
    return steps[at], values[at]


def theil_sen(steps: Array, values: Array) -> tuple[float, float, float]:
    """Return the median slope of all pairs and its 90 % interval (Sen 1968, JASA 63).

    The interval takes the slopes whose ranks are 1.645 sigma of Kendall's S from the middle.
    """
    first, second = np.triu_indices(len(steps), 1)
    slopes = np.sort((values[second] - values[first]) / (steps[second] - steps[first]))
    half = _Z_90 * math.sqrt(_kendall_variance(len(steps))) / 2
    middle = (len(slopes) - 1) / 2
    low = slopes[max(0, int(middle - half))]
    high = slopes[min(len(slopes) - 1, math.ceil(middle + half))]
    return float(np.median(slopes)), float(low), float(high)


def kendall_p(values: Array) -> float:
    """Return the one-sided p that a series without a trend rises so steadily (Mann 1945)."""
    count = len(values)
    if count < 3:
        return 1.0
    first, second = np.triu_indices(count, 1)
    score = float(np.sum(np.sign(values[second] - values[first])))
    z = (score - 1) / math.sqrt(_kendall_variance(count)) if score > 0 else 0.0
    return 0.5 * math.erfc(z / math.sqrt(2.0))


def _kendall_variance(count: int) -> float:
    return count * (count - 1) * (2 * count + 5) / 18


def trend_of(
    steps: Array, values: Array, *, least: float, max_p: float, min_points: int, over_steps: int
) -> Trend | None:
    """Return how a series grows, None where it does not, or has stopped.

    A trend is steady (p), larger than three sigma of its residuals and than `least` over its span
    or `over_steps`, and still on. Growth in a few even jumps is a staircase.
    """
    steps, values = thin(np.asarray(steps, float), np.asarray(values, float))
    if len(steps) < min_points or values[-1] - values[0] < least / 2 or kendall_p(values) >= max_p:
        return None
    stairs = _staircase(steps, values, least)
    if stairs is not None:
        return stairs
    onset = _onset(steps, values)
    if len(steps) - onset < min_points // 2:
        return None
    x, y = steps[onset:], values[onset:]
    slope, low, high = theil_sen(x, y)
    residuals = y - slope * x
    sigma = SIGMA_PER_MAD * float(np.median(np.abs(residuals - np.median(residuals))))
    span = int(x[-1] - x[0])
    if slope <= 0 or slope * max(span, over_steps) <= max(3 * sigma, least):
        return None
    if slope * span <= 3 * sigma:
        return None
    if _flattens(x, y, slope):
        return None
    return Trend(slope, low, high, int(x[0]), span, sigma)


def _flattens(steps: Array, values: Array, slope: float) -> bool:
    """Return whether the growth fades: a cache that fills, a high-water mark.

    A cache that fills as 1 - exp(-t / tau) has 0.56 of its first half's slope in the second after
    1.2 tau; a leak has the same in both.
    """
    half, quarter = max(len(steps) // 2, 8), max(len(steps) // 4, 8)
    late = theil_sen(steps[-half:], values[-half:])[0]
    early = theil_sen(steps[:half], values[:half])[0]
    last = theil_sen(steps[-quarter:], values[-quarter:])[0]
    return late < 0.75 * early or last < 0.7 * slope


def _onset(steps: Array, values: Array) -> int:
    """Return from which point a flat and then rising line fits best (least squares)."""
    best, best_error = 0, math.inf
    for at in range(0, max(1, len(steps) - 8)):
        rise = np.maximum(steps - steps[at], 0.0)
        centred, shifted = rise - rise.mean(), values - values.mean()
        power = float(centred @ centred)
        if power <= 0:
            continue
        error = float(shifted @ shifted) - float(centred @ shifted) ** 2 / power
        if error < best_error * (1 - 1e-9):
            best, best_error = at, error
    return best


def _staircase(steps: Array, values: Array, least: float) -> Trend | None:
    """Return a trend made of a few jumps at even distances with nothing in between."""
    rises = np.diff(values)
    total = values[-1] - values[0]
    order = np.argsort(rises)[::-1]
    large = np.sort(order[rises[order] > 0.5 * rises[order[0]]])
    if not _MIN_JUMPS <= len(large) <= len(rises) // 4:
        return None
    between = np.delete(rises, large)
    if rises[large].sum() < 0.8 * total or abs(between.sum()) > 0.25 * total or total < least:
        return None
    at = steps[large + 1]
    gaps = np.diff(at)
    grain = 2 * float(np.median(np.diff(steps)))
    if gaps.max() - gaps.min() > 0.25 * np.median(gaps) + grain:
        return None
    every = float(np.median(gaps))
    if steps[-1] - at[-1] > 1.5 * every + np.median(np.diff(steps)):
        return None  # it has stopped
    heights = values[large + 1]
    if len(heights) < 2:
        return None
    slope, low, high = theil_sen(at, heights)
    sigma = SIGMA_PER_MAD * float(np.median(np.abs(between - np.median(between))))
    if slope <= 0:
        return None
    return Trend(slope, low, high, int(at[0]), int(steps[-1] - at[0]), sigma, True, int(every))
