"""Values of many ranks on one grid of time: least, last and largest of each slice. Pure.

A value holds until the next one, but not for longer than 2.5 of the usual pauses between values:
what comes later is missing, and shown as missing.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
_HOLD_PAUSES = 2.5
_LEAST_PEERS = 4  # of fewer there is no usual one
_APART_SCORES = 4.0  # robust standard deviations, as on the map
_APART_SHARE = 0.08  # of the peers' median
_NOISE_SHARE = 0.02  # of the median: peers that are all alike have some noise
_SPIKE = 4.0  # one slice so many times further off counts as much as being off all the time


@dataclass(frozen=True, slots=True)
class Grid:
    """Slices of time of one length."""

    begin_ns: int
    bin_ns: int
    count: int

    def of(self, times_ns: Array) -> Array:
        """Return the slice of each time; -1 or `count` and more are outside."""
        found: Array = (times_ns - self.begin_ns) // self.bin_ns
        return found


@dataclass(frozen=True, slots=True)
class Lines:
    """One row for each rank, GPU or node, one column for each slice; NaN where not known."""

    low: Array
    last: Array
    high: Array


def on_grid(grid: Grid, series: Sequence[tuple[Array, Array]]) -> Lines:
    """Return the lines of (times, values), each in the order of time."""
    low, last, high = (np.full((len(series), grid.count), np.nan) for _ in range(3))
    lengths = [len(times) for times, _ in series]
    rows = np.repeat(np.arange(len(series)), lengths)
    times = np.concatenate([np.zeros(0, np.int64), *(times for times, _ in series)])
    values = np.concatenate([np.zeros(0), *(values for _, values in series)])
    slices = grid.of(times)
    inside = (slices >= 0) & (slices < grid.count) & ~np.isnan(values)
    rows, times, values, slices = rows[inside], times[inside], values[inside], slices[inside]
    if len(rows):
        cells = rows * grid.count + slices
        starts = np.flatnonzero(np.diff(cells, prepend=-1))
        places = rows[starts], slices[starts]
        low[places] = np.minimum.reduceat(values, starts)
        high[places] = np.maximum.reduceat(values, starts)
        last[places] = values[np.append(starts[1:], len(values)) - 1]
        most = _HOLD_PAUSES * _pauses_ns(rows, times, len(series)) / grid.bin_ns
        _hold(most.astype(np.int64), low, last, high)
    return Lines(low, last, high)


def _pauses_ns(rows: Array, times: Array, count: int) -> Array:
    """Return for each row the median time between two of its values; 0 where it has only one."""
    is_same = rows[1:] == rows[:-1]
    owner, pause = rows[1:][is_same], np.diff(times)[is_same]
    order = np.lexsort((pause, owner))
    owner, pause = owner[order], pause[order]
    begin = np.searchsorted(owner, np.arange(count))
    number = np.searchsorted(owner, np.arange(count), side="right") - begin
    found = np.zeros(count)
    known = np.flatnonzero(number)
    lower, upper = (begin + (number - 1) // 2)[known], (begin + number // 2)[known]
    found[known] = (pause[lower] + pause[upper]) / 2
    return found


def _hold(most: Array, low: Array, last: Array, high: Array) -> None:
    """Fill slices without a value by the last one of the row, at most so many in a row."""
    columns = np.arange(last.shape[1])
    is_known = ~np.isnan(last)
    source = np.maximum.accumulate(np.where(is_known, columns, -1), axis=1)
    is_held = ~is_known & (source >= 0) & (columns - source <= most[:, None])
    rows, places = np.nonzero(is_held)
    held = last[rows, source[rows, places]]
    for values in (low, last, high):
        values[rows, places] = held


def quiet(function: Any, values: Array, axis: int) -> Array:
    """Return a NaN-aware function of some values, NaN without a warning where none is known."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found: Array = function(values, axis=axis)
    return found


@dataclass(frozen=True, slots=True)
class Deviations:
    """How far each line is from its peers on the bad side, and which are outliers."""

    lines: Array  # the worst value of each slice
    typical: Array  # of each line, the median of its last values
    furthest: Array  # the value by which it is furthest: the same, or that of one slice
    scores: Array  # robust standard deviations, most of the time or in one slice
    apart: Array  # bool


def deviations_of(lines: Lines, worst: str) -> Deviations:
    """Compare lines with the median of all of them, slice by slice."""
    median = quiet(np.nanmedian, lines.last, 0)
    # of the last values: the worst of several is further off for every line
    lasting = quiet(np.nanmedian, lines.last - median, 1)
    if worst == "apart":
        is_high = np.abs(lines.high - median) >= np.abs(lines.low - median)
        values = np.where(is_high, lines.high, lines.low)
        off, lasting = np.abs(values - median), np.abs(lasting)
    else:
        sign = 1.0 if worst == "high" else -1.0
        values = lines.high if worst == "high" else lines.low
        off, lasting = (values - median) * sign, lasting * sign
    usual = float(quiet(np.nanmedian, np.abs(median), 0)) if median.size else np.nan
    noise = 1.4826 * float(quiet(np.nanmedian, np.abs(lines.last - median).reshape(-1), 0))
    scale = max(noise, _NOISE_SHARE * usual, 1e-12)
    spike = quiet(np.nanmax, off, 1) if off.size else np.zeros(0)
    scores = np.nan_to_num(np.maximum(lasting, spike / _SPIKE) / scale, nan=-1.0)
    known = int((~np.isnan(lines.last)).any(axis=1).sum())
    apart = (lasting >= _APART_SCORES * scale) & (lasting >= _APART_SHARE * usual)
    typical = quiet(np.nanmedian, lines.last, 1)
    furthest = typical.copy()
    by_spike = np.flatnonzero(np.nan_to_num(spike / _SPIKE - lasting, nan=-1.0) > 0)
    furthest[by_spike] = values[by_spike, np.nanargmax(off[by_spike], axis=1)]
    return Deviations(values, typical, furthest, scores, apart & (known >= _LEAST_PEERS))
