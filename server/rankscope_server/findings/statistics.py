"""Statistics over ranks x steps that may hold NaN. Medians ignore what is missing."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Array = NDArray[Any]
_BLOCK_CELLS = 1 << 20  # bounds the memory of one sort
_EXACT_OTHERS = 32  # up to so many rows "the others" leaves the row itself out
_TURNED_CELLS = 1 << 16  # from so many on rows are sorted faster than columns
_TURNED_ROWS = 256  # at once: their cells stay in the processor's cache


def median(values: Array, axis: int = -1) -> Array:
    """Return the median along an axis; NaN where nothing is known. Never warns."""
    if axis == 0 and values.ndim == 2 and values.size >= _TURNED_CELLS:
        values, axis = _turned(values), -1
    ordered, num = np.sort(values, axis=axis), values.shape[axis]  # NaN go last
    if num and not np.isnan(ordered.take(-1, axis)).any():  # the usual case: all are known
        return np.asarray((ordered.take((num - 1) // 2, axis) + ordered.take(num // 2, axis)) / 2)
    known = np.sum(~np.isnan(values), axis=axis, keepdims=True)
    return np.squeeze(_middles(ordered, known, axis), axis)


def _turned(values: Array) -> Array:
    """Return rows as columns, side by side in memory."""
    turned = np.empty(values.shape[::-1], values.dtype)
    for begin in range(0, len(values), _TURNED_ROWS):
        part = slice(begin, begin + _TURNED_ROWS)
        turned[:, part] = values[part].T
    return turned


def _middles(ordered: Array, known: Array, axis: int) -> Array:
    """Return the middle of the first `known` values along an axis, NaN where none is."""
    low = np.take_along_axis(ordered, np.maximum((known - 1) // 2, 0), axis)
    high = np.take_along_axis(ordered, np.minimum(known // 2, ordered.shape[axis] - 1), axis)
    return np.where(known > 0, (low + high) / 2, np.nan)


def middle(values: Array) -> float:
    """Return the median of what is known, NaN for nothing."""
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else float("nan")


def rolling_median(values: Array, window: int, first_column: int = 0) -> Array:
    """Return the median of each cell and the `window - 1` before it in its row.

    Columns from `first_column` on. NaN where less than half of the window is known.
    """
    rows, columns = values.shape
    result = np.full((rows, columns - first_column), np.nan, values.dtype)
    padded = np.concatenate([np.full((rows, window - 1), np.nan, values.dtype), values], axis=1)
    windows = sliding_window_view(padded, window, axis=1)
    counts = np.pad(np.cumsum(~np.isnan(padded), axis=1, dtype=np.int32), ((0, 0), (1, 0)))
    known = counts[:, window:] - counts[:, :-window]
    width = max(1, _BLOCK_CELLS // max(1, rows * window))
    for begin in range(first_column, columns, width):
        part = slice(begin, min(begin + width, columns))
        ordered, num = np.sort(windows[:, part], axis=2), known[:, part]  # NaN go last
        if (num == window).all():  # the usual case
            low, high = ordered[..., (window - 1) // 2], ordered[..., window // 2]
            found = (low + high) / 2
        else:
            found = np.squeeze(_middles(ordered, num[..., None], 2), 2)
            found[num * 2 < window] = np.nan
        result[:, part.start - first_column : part.stop - first_column] = found
    return result


def others_median(values: Array, min_known: int) -> Array:
    """Return for each cell the median of the other rows in its column.

    NaN where fewer than `min_known` rows of the column are known. In a crowd the row itself is
    not left out: it moves the median by less than one place.
    """
    enough = np.sum(~np.isnan(values), axis=0) >= min_known
    if len(values) > _EXACT_OTHERS:
        return np.where(enough, np.broadcast_to(median(values, 0), values.shape), np.nan)
    order = np.argsort(values, axis=0)  # NaN go last
    place = np.argsort(order, axis=0)
    ordered = np.take_along_axis(values, order, 0)
    is_known = ~np.isnan(values)
    num_others = np.sum(is_known, axis=0) - is_known  # that are known

    def pick(number: Array) -> Array:
        """Return from each column the value with this number among the others, by size."""
        found: Array = np.take_along_axis(
            ordered, np.minimum(number + (number >= place), len(values) - 1), 0
        )
        return found

    middle = (pick(np.maximum((num_others - 1) // 2, 0)) + pick(num_others // 2)) / 2
    known: Array = np.where(enough & (num_others > 0), middle, np.nan)
    return known


def scatter(values: Array, lag: int = 1) -> Array:
    """Return the sigma of each row from its differences at `lag`.

    A lasting shift moves only `lag` of the differences, so a fault hardly widens it, where the
    deviation from the row's own median would. In a short record these may be most of them: the
    `lag` largest are left out, and the median of the others is taken for the quantile that it is.
    """
    if values.shape[1] <= lag:
        return np.full(len(values), np.nan)
    differences = np.sort(np.abs(values[:, lag:] - values[:, :-lag]), axis=1)  # NaN go last
    known = np.sum(~np.isnan(differences), axis=1)
    kept = np.where(known > lag, known - lag, known)  # where all may be moved, none is better
    sigma: Array = np.full(len(values), np.nan)
    middles = _middles(differences, kept[:, None], 1)[:, 0]
    for num_known, num_kept in set(zip(known.tolist(), kept.tolist(), strict=True)):
        if num_kept:
            rows = known == num_known
            quantile = num_kept / (2 * num_known)
            at_one_sigma = NormalDist().inv_cdf(0.5 + quantile / 2) * np.sqrt(2.0)
            sigma[rows] = middles[rows] / at_one_sigma
    return sigma
