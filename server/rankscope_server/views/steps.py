"""Step times of a run: ranges of tiles, the throughput strip, where a step goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope_server.shapes import Budget, BudgetRow, Throughput
from rankscope_server.store.tiles import (
    BLOCK_STEPS,
    BLOCKED_METRICS,
    PHASE_METRICS,
    STARTED,
    dtype_of,
    read_blocks,
)
from rankscope_server.views.names import duration_text, percent

Array = np.ndarray[Any, np.dtype[Any]]
MAX_COLUMNS = 4_096
MAX_BUDGET_STEPS = 5_000
MAX_BUDGET_ROWS = 12
BASELINE_STEPS = 200
RECENT_STEPS = 50
WARM_UP_STEPS = 5
BUDGET_PARTS = (
    "data",
    "forward",
    "backward",
    "optimizer",
    "checkpoint",
    "evaluation",
    "other",
    "waiting",
)


def load_range(
    connection: sa.Connection, run_id: str, metrics: tuple[str, ...], lo: int, hi: int
) -> dict[str, Array]:
    """Return each metric as ranks by steps `lo`..`hi`; missing cells are NaN, or 0 for times."""
    blocks = list(read_blocks(connection, run_id, metrics, lo, hi))
    height = max((len(planes[metrics[0]]) for _, planes in blocks), default=0)
    width = max(hi - lo + 1, 0)
    result = {
        metric: np.full((height, width), 0 if metric == STARTED else np.nan, dtype_of(metric))
        for metric in metrics
    }
    for first, planes in blocks:
        source = slice(max(lo - first, 0), min(hi + 1 - first, BLOCK_STEPS))
        target = slice(first + source.start - lo, first + source.stop - lo)
        for metric, plane in planes.items():
            result[metric][: len(plane), target] = plane[:, source]
    return result


def bin_of(num_steps: int, width: int) -> int:
    """Return the smallest power of two that fits `num_steps` into `width` columns."""
    width = min(max(width, 1), MAX_COLUMNS)
    size = 1
    while -(-num_steps // size) > width:
        size *= 2
    return size


def quiet(function: Any, values: Array, axis: int | None = None) -> Any:
    """Apply a NaN-aware numpy reduction; where all is missing the result is NaN, unsaid."""
    values = np.asarray(values, dtype=np.float64)
    if values.size == 0:
        return np.float64(np.nan) if axis is None else np.full(values.shape[1 - axis], np.nan)
    with np.errstate(all="ignore"):
        missing = np.isnan(values).all(axis=axis, keepdims=axis is not None)
        if axis is None:
            return np.float64(np.nan) if missing else function(values)
        filled = np.where(missing, 0.0, values)
        return np.where(np.squeeze(missing, axis), np.nan, function(filled, axis=axis))


def known(value: Any) -> float | None:
    """Return a float, or None for NaN."""
    return None if np.isnan(value) else float(value)


def known_list(values: Array) -> list[float | None]:
    """Return floats with None for NaN, rounded to a microsecond."""
    return [None if np.isnan(value) else round(float(value), 3) for value in values]


def median_step_ms(connection: sa.Connection, run_id: str, lo: int, hi: int) -> float | None:
    """Return the median over steps of the slowest rank's step time; None without data."""
    if hi < lo:
        return None
    steps = load_range(connection, run_id, ("step",), lo, hi)["step"]
    return known(quiet(np.nanmedian, quiet(np.nanmax, steps, axis=0))) if steps.size else None


def before_and_now(
    connection: sa.Connection, run_id: str, last: int, onset: int | None
) -> tuple[float | None, float | None]:
    """Return the step time before `onset` (or early in the run) and the recent one, in ms."""
    now = median_step_ms(connection, run_id, max(1, last - RECENT_STEPS + 1), last)
    if onset is not None:
        lo, hi = max(WARM_UP_STEPS + 1, onset - BASELINE_STEPS), onset - 1
    else:
        lo, hi = WARM_UP_STEPS + 1, WARM_UP_STEPS + RECENT_STEPS
        if last < hi + RECENT_STEPS:
            return None, now
    return median_step_ms(connection, run_id, lo, hi), now


def throughput(
    connection: sa.Connection,
    run_id: str,
    lo: int,
    hi: int,
    width: int,
    onset: int | None,
    last: int,
) -> Throughput:
    """Return least, median and largest step time of each bin of steps."""
    size = bin_of(hi - lo + 1, width)
    columns = max(-(-(hi - lo + 1) // size), 0)
    parts: dict[int, list[Array]] = {}
    times = np.zeros(columns, np.int64)
    for first, planes in read_blocks(connection, run_id, ("step", STARTED), lo, hi):
        numbers = np.arange(first, first + BLOCK_STEPS)
        inside = (numbers >= lo) & (numbers <= hi)
        places = (numbers - lo) // size
        slowest = quiet(np.nanmax, planes["step"], axis=0)
        for column in np.unique(places[inside]).tolist():
            chosen = inside & (places == column)
            parts.setdefault(column, []).append(slowest[chosen])
            started = planes[STARTED][:, chosen]
            if not times[column] and started.any():
                times[column] = started[started > 0].min()
    stats = np.full((3, columns), np.nan)
    for column, values in parts.items():
        joined = np.concatenate(values)
        for row, function in enumerate((np.nanmin, np.nanmedian, np.nanmax)):
            stats[row, column] = quiet(function, joined)
    before, now = before_and_now(connection, run_id, last, onset)
    return Throughput(
        bin=size,
        step=[lo + column * size for column in range(columns)],
        time_ms=[time / 1e6 if time else None for time in times.tolist()],
        step_min_ms=known_list(stats[0]),
        step_median_ms=known_list(stats[1]),
        step_max_ms=known_list(stats[2]),
        before_ms=before,
        now_ms=now,
        onset_step=onset,
    )


def budget(connection: sa.Connection, run_id: str, last_step: int, last: int) -> Budget:
    """Return where the steps go: phases without waiting, and the waiting for peers apart."""
    last = min(max(last, 1), MAX_BUDGET_STEPS)
    lo = max(1, last_step - last + 1)
    metrics = ("step", *PHASE_METRICS, *BLOCKED_METRICS)
    planes = load_range(connection, run_id, metrics, lo, last_step)
    means = {metric: quiet(np.nanmean, plane, axis=1) for metric, plane in planes.items()}
    ranks = [rank for rank, value in enumerate(means["step"].tolist()) if not np.isnan(value)]
    rows = [_budget_row(rank, means) for rank in ranks]
    # Rows of phases may not fill the step: what no phase holds is "other", never dropped.
    rows.sort(key=lambda row: -(row.total_ms - row.parts["waiting"]))
    shown = rows if len(rows) <= MAX_BUDGET_ROWS else [*rows[: MAX_BUDGET_ROWS - 1], rows[-1]]
    summary = [_median_row(rows)] if len(rows) > 1 else []
    return Budget(
        step_lo=lo,
        step_hi=last_step,
        rows=summary + shown,
        parts=list(BUDGET_PARTS),
        text=_budget_text(rows, last_step - lo + 1),
    )


def _budget_row(rank: int, means: dict[str, Array]) -> BudgetRow:
    def mean(metric: str) -> float:
        value = means[metric][rank]
        return 0.0 if np.isnan(value) else float(value)

    parts = {
        metric: max(
            mean(metric) - (mean(f"{metric}_blocked") if f"{metric}_blocked" in means else 0), 0
        )
        for metric in PHASE_METRICS
    }
    parts["waiting"] = sum(mean(metric) for metric in BLOCKED_METRICS)
    total = mean("step")
    parts["other"] += max(total - sum(parts.values()), 0.0)
    rounded = {name: round(parts[name], 3) for name in BUDGET_PARTS}
    return BudgetRow(label=f"Rank {rank}", rank=rank, total_ms=round(total, 3), parts=rounded)


def _median_row(rows: list[BudgetRow]) -> BudgetRow:
    parts = {
        name: round(float(np.median([row.parts[name] for row in rows])), 3) for name in BUDGET_PARTS
    }
    total = round(sum(parts.values()), 3)  # a row's parts add up to its total, always
    return BudgetRow(label="Median of ranks", rank=None, total_ms=total, parts=parts)


def _budget_text(rows: list[BudgetRow], steps: int) -> str:
    if not rows:
        return "No step data yet."
    total = float(np.median([row.total_ms for row in rows]))
    busiest = rows[0]
    if len(rows) == 1 or total <= 0:
        return f"A step takes {duration_text(busiest.total_ms)} (mean of {steps} steps)."
    waiting = float(np.median([row.parts["waiting"] for row in rows])) / total
    work = busiest.total_ms - busiest.parts["waiting"]
    return (
        f"A step takes {duration_text(total)}; the median rank waits {percent(waiting)} of it for "
        f"peers; rank {busiest.rank} works longest, {duration_text(work)}."
    )
