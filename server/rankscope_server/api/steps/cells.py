"""The cells of the map: steps and ranks folded into bins, a bin encoded as one byte."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from rankscope_server.api.steps.lanes import Lanes
from rankscope_server.api.steps.queries import quiet
from rankscope_server.api.steps.schema import Usual

Array = np.ndarray[Any, np.dtype[Any]]
Reference: TypeAlias = Literal["peers", "own"]
MISSING = 255
USUAL = (
    1 / 1.08,
    1.08,
)  # ratios that never get a colour: the least entry of the slow-rank detector
MOST_USUAL = 1.9  # a rank that takes twice as long is shown on the noisiest machine
_SIGMAS = 4.0
_STRETCH = 16  # cells that are looked at together; as `STRETCH` of web/app/charts/scene.js
_OF_MEDIAN = 1.25
_LEAST_CELLS = 8  # of a lane, to say how much it varies
_SAMPLE = (64, 128)  # lanes and columns are enough for a median


@dataclass(slots=True)
class Plane:
    """Ranks by columns: the worst value of each bin, and how many cells it holds."""

    worst: Array
    present: Array
    times: Array
    kinds: set[Reference]


class StepSample:
    """Ratios of some ranks in some single steps of a range: what its bins are made of."""

    def __init__(self, height: int, first: int, last: int) -> None:
        """`height` is the number of ranks."""
        lanes, steps = _SAMPLE
        self._rows = np.arange(0, height, max(1, height // lanes))
        self._first, self._every = first, max(1, (last - first + 1) // steps)
        self._parts: list[Array] = []

    def add(self, ratio: Array, step: int) -> None:
        """Take what is wanted of the next ranks x steps, of which `step` is the first."""
        begin = -(step - self._first) % self._every
        self._parts.append(ratio[self._rows][:, begin :: self._every])

    def usual(self, *, is_of_peers: bool) -> Usual | None:
        """Return between which ratios single steps are in this run anyway; None if not known."""
        if not self._parts:
            return None
        return usual_ratios(np.concatenate(self._parts, axis=1), is_of_peers=is_of_peers)


class Held:
    """Repeats the last value of rows that are sampled, where the next ones are missing."""

    def __init__(self, rows: Array, most_steps: int) -> None:
        """`rows` says of which rows; a value holds for `most_steps`."""
        self._rows, self._most = np.flatnonzero(rows), most_steps
        self._last = np.full(len(self._rows), np.nan)
        self._age = np.zeros(len(self._rows), np.int64)
        self.num_measured = self.num_held = 0

    @property
    def num_rows(self) -> int:
        """Return how many rows are sampled."""
        return len(self._rows)

    def fill(self, values: Array, early: int = 0) -> Array:
        """Return the next columns with their gaps filled, rows by steps without a gap between.

        The numbers measured and repeated are not counted for the first `early` columns.
        """
        if not len(self._rows) or not values.shape[1]:
            return values
        own = np.column_stack([self._last, values[self._rows]])
        place = np.arange(own.shape[1])
        is_known = ~np.isnan(own)
        newest = np.maximum.accumulate(np.where(is_known, place, -1), axis=1)
        age = place - newest + np.where(newest == 0, self._age[:, None], 0)
        filled = np.take_along_axis(own, np.maximum(newest, 0), axis=1)
        filled[(newest < 0) | (age > self._most)] = np.nan
        self.num_measured += int(is_known[:, 1 + early :].sum())
        self.num_held += int((~np.isnan(filled[:, 1 + early :])).sum())
        self._last, self._age = filled[:, -1], age[:, -1]
        result = values.copy()
        result[self._rows] = filled[:, 1:]
        return result


def fold_block(plane: Plane, values: Array, places: Array) -> None:
    """Add the values of some steps, `places` being their columns in order."""
    columns, starts = np.unique(places, return_index=True)
    if not len(columns):
        return
    present, worst = ~np.isnan(values), values
    if len(columns) < len(places):
        present = np.add.reduceat(present, starts, axis=1, dtype=np.int32)
        worst = np.fmax.reduceat(values, starts, axis=1)
    at = slice(int(columns[0]), int(columns[-1]) + 1)  # steps follow each other, so do columns
    plane.worst[:, at] = np.fmax(plane.worst[:, at], worst)
    plane.present[:, at] += present


def fold_times(plane: Plane, started: Array, places: Array) -> None:
    """Note the earliest start of each column."""
    never = np.iinfo(np.int64).max
    earliest = started.min(axis=0, where=started > 0, initial=never)
    for place, time in zip(places.tolist(), earliest.tolist(), strict=True):
        if time < never and not plane.times[place]:
            plane.times[place] = time


def fold_ranks(plane: Plane, lanes: Lanes, size: int, num_steps: int) -> tuple[Array, Array]:
    """Return (worst value, share of missing cells as 0..255) of each lane and column."""
    height, starts = plane.worst.shape[0], lanes.starts
    if not plane.worst.size:
        empty = np.zeros((len(starts), plane.worst.shape[1]))
        return np.full(empty.shape, np.nan), empty
    worst, present = plane.worst, plane.present
    if not lanes.is_by_rank:
        worst, present = worst[lanes.ranks], present[lanes.ranks]
    if len(starts) < height:
        worst = np.fmax.reduceat(worst, starts, axis=0)
        present = np.add.reduceat(present, starts, axis=0)
    ranks = np.diff(np.append(starts, height))[:, None]
    return worst, missing_share(present, ranks * widths(plane, size, num_steps))


def deviations(plane: Plane, first: int, *, is_ratio: bool) -> Array:
    """Return how much each rank deviates, from column `first` on; NaN where it has no data.

    The root of the mean square of what a ratio exceeds 1 by, or a duration the shortest of its
    column: squares, so that one very slow step counts beside many that are a little slow. Of a
    rank that has data only before that column those count.
    """
    least = 1.0 if is_ratio else np.fmin.reduce(plane.worst, axis=0, initial=np.nan)
    squares = np.maximum(plane.worst - least, 0) ** 2
    whole: Array = np.sqrt(quiet(np.nanmean, squares, axis=1))
    if not 0 < first < squares.shape[1]:
        return whole
    late: Array = np.sqrt(quiet(np.nanmean, squares[:, first:], axis=1))
    return np.where(np.isnan(late), whole, late)


def widths(plane: Plane, size: int, num_steps: int) -> Array:
    """Return how many steps each column holds; the last one may hold fewer."""
    columns = plane.worst.shape[1]
    found = np.full(columns, size)
    found[-1:] = num_steps - size * (columns - 1)
    return found


def missing_share(present: Array, cells: Array) -> Array:
    """Return the share of missing cells as 0..255."""
    if (present >= cells).all():
        return np.zeros(present.shape)
    share = np.clip(1.0 - present / np.maximum(cells, 1), 0.0, 1.0)
    # A single missing cell among many must not round to none.
    return np.where(share > 0, np.maximum(np.round(share * 255), 1), 0)


def usual_ratios(worst: Array, *, is_of_peers: bool) -> Usual | None:
    """Return between which ratios the cells of a map are in this run anyway; None if not known.

    Four robust standard deviations around the middle. How much cells vary is taken within each
    lane, over its columns: ranks that are slow all the time do not widen it. In bins of many cells
    the worst one is usually above 1, so the middle is that of most lanes. Where lanes are compared
    with their own past that could be a slowdown of all, and counts as far as it is noise.
    """
    lanes, columns = (max(1, size // most) for size, most in zip(worst.shape, _SAMPLE, strict=True))
    some = worst[::lanes, ::columns]
    some = some[(some > 0).sum(axis=1) >= _LEAST_CELLS]
    if not len(some):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        levels = np.where(some > 0, np.log2(some), np.nan)
    middles = np.nanmedian(levels, axis=1)
    sigma = 1.4826 * float(np.median(np.nanmedian(np.abs(levels - middles[:, None]), axis=1)))
    middle = float(np.median(middles))
    if not is_of_peers:
        middle = float(np.clip(middle, -3 * sigma, 3 * sigma))
    low, high = middle - _SIGMAS * sigma, middle + _SIGMAS * sigma
    return Usual(ratio=2**middle, lo=2**low, hi=2**high, sigma=sigma)


def robust_z(ratio: float, usual: Usual | None) -> float | None:
    """Return how many robust standard deviations of this run's noise a ratio is from its middle.

    None where the noise is not known, or there is none.
    """
    if usual is None or not usual.sigma or not ratio > 0:
        return None
    return round(float(np.log2(ratio / usual.ratio)) / usual.sigma, 3) + 0.0  # never -0


def usual_band(usual: Usual | None, num_cells: int) -> tuple[float, float]:
    """Return between which ratios the median of `num_cells` cells of one rank is anyway.

    Of one cell this is where the map has no colour, of 16 where a stretch of it has none: the
    median of normal noise varies by 1.25 over the root of their number.
    """
    if usual is None:
        return USUAL
    share = min(1.0, _OF_MEDIAN / min(num_cells, _STRETCH) ** 0.5) if num_cells else 1.0
    low = usual.ratio * (usual.lo / usual.ratio) ** share
    high = usual.ratio * (usual.hi / usual.ratio) ** share
    return max(1 / MOST_USUAL, min(USUAL[0], low)), min(MOST_USUAL, max(USUAL[1], high))


def scale_of(worst: Array) -> float:
    """Return the value of the highest level, in ms."""
    values = worst[~np.isnan(worst)]
    # One hiccup of a minute must not turn everything else into the same colour.
    return float(np.percentile(values, 99.5)) or 1.0 if len(values) else 1.0


def encode(values: Array, scale: float | None) -> str:
    """Return cells in base64: log2 of a ratio, or linear up to `scale`."""
    with np.errstate(divide="ignore", invalid="ignore"):
        if scale is None:
            levels = np.round(127 + 127 * np.log2(values))
        else:
            levels = np.round(254 * values / scale)
    return to_base64(np.where(np.isnan(values), MISSING, np.clip(levels, 0, 254)))


def to_base64(values: Array) -> str:
    """Return numbers from 0 to 255 in base64."""
    return base64.b64encode(np.ascontiguousarray(values).astype(np.uint8).tobytes()).decode()
