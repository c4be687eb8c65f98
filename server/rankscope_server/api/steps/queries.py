"""Step times of a run: ranges of tiles, the throughput strip."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope_server.api.parameters import MAX_COLUMNS
from rankscope_server.api.steps.schema import Throughput
from rankscope_server.findings.policy import POLICY
from rankscope_server.ingest.step_metrics import STARTED
from rankscope_server.store import tables
from rankscope_server.store.tiles import dtype_of, read_blocks
from rankscope_server.text import duration_text

Array = np.ndarray[Any, np.dtype[Any]]
BASELINE_STEPS = 200
RECENT_STEPS = 50
WARM_UP_STEPS = POLICY.warmup_steps
MAX_CELLS = 1_000_000  # ranks by steps; of thirty planes of one page they are some 150 MB


def load_range(
    connection: sa.Connection,
    run_id: str,
    metrics: tuple[str, ...],
    lo: int,
    hi: int,
    only_attempt: int | None = None,
) -> dict[str, Array]:
    """Return each metric as ranks by steps `lo`..`hi`; missing cells are NaN, or 0 for times.

    Of a step that several attempts ran the newest counts, unless one attempt is asked for.
    """
    result = {metric: missing_plane(metric, 0, max(hi - lo + 1, 0)) for metric in metrics}
    for first, planes in read_blocks(connection, run_id, metrics, lo, hi, only_attempt):
        for metric, plane in planes.items():
            known = result[metric]
            if len(known) < len(plane):
                more = missing_plane(metric, len(plane) - len(known), known.shape[1])
                result[metric] = known = np.concatenate([known, more])
            known[: len(plane), first - lo : first - lo + plane.shape[1]] = plane
    return result


def missing_plane(metric: str, ranks: int, steps: int) -> Array:
    """Return ranks by steps of which nothing is known."""
    return np.full((ranks, steps), 0 if metric == STARTED else np.nan, dtype_of(metric))


def steps_of_many(world_size: int, ranks: Iterable[int]) -> int:
    """Return of how many steps a page may hold the planes of a run: at least one."""
    return max(1, MAX_CELLS // max(world_size, 1 + max(ranks, default=0)))


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
        if axis is None:
            return np.float64(np.nan) if np.isnan(values).all() else function(values)
        missing = np.isnan(values).all(axis=axis, keepdims=True)
        filled = np.where(missing, 0.0, values)
        return np.where(np.squeeze(missing, axis), np.nan, function(filled, axis=axis))


def known(value: Any) -> float | None:
    """Return a float, or None for NaN."""
    return None if np.isnan(value) else float(value)


def known_list(values: Array) -> list[float | None]:
    """Return floats with None for NaN, rounded to a microsecond."""
    return [None if np.isnan(value) else round(float(value), 3) for value in values]


def first_step(connection: sa.Connection, run_id: str) -> int:
    """Return the first step of the newest attempt that has one, 1 where none has."""
    table = tables.attempt.c
    found = connection.scalar(
        sa.select(table.step_lo)
        .where(table.run_id == run_id, table.step_lo.is_not(None))
        .order_by(table.attempt.desc())
        .limit(1)
    )
    return max(1, int(found or 1))


def typical_range(
    connection: sa.Connection, run_id: str, last: int, count: int, onset: int | None
) -> tuple[int, int]:
    """Return the first and last of at most `count` steps up to `last` that show a typical step.

    Its time is their median. Steps of the warm-up are not among them, and none from before what is
    wrong now, which began at `onset`: healthy steps must not soften it.
    """
    first = first_step(connection, run_id)
    lo = max(first + warm_up_steps(last - first + 1), last - count + 1)
    return (onset if onset is not None and lo < onset <= last else lo), last


def warm_up_steps(num_steps: int) -> int:
    """Return how many of so many steps are warm-up: start-up, compilation, cold caches.

    Of the first few it is half of them, so that there is a typical step from the second on.
    """
    return min(WARM_UP_STEPS, max(num_steps, 0) // 2)


def warm_up_text(connection: sa.Connection, run_id: str, last: int) -> str:
    """Return how long the warm-up took, by the slowest rank of each step; empty if not known."""
    first = first_step(connection, run_id)
    count = warm_up_steps(last - first + 1)
    steps = load_range(connection, run_id, ("step",), first, first + count - 1)["step"]
    took = known(quiet(np.nansum, quiet(np.nanmax, steps, axis=0))) if steps.size else None
    if not took:
        return ""
    which = "first step" if count == 1 else f"first {count} steps"
    return f"without the warm-up: {which}, {duration_text(took)}"


def waiting_planes(planes: dict[str, Array]) -> dict[str, Array]:
    """Leave out the cells of ranks whose collectives were not counted while those of others were.

    Their waits would look like work, and make the shortest wait of their role nothing.
    """
    counted = planes["num_collectives"]
    unseen = (counted == 0) & np.any(counted > 0, axis=0)
    return planes | {
        name: np.where(unseen, np.nan, planes[name]) for name in ("step", "blocked")
    }  # fmt: skip


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
    recent = typical_range(connection, run_id, last, RECENT_STEPS, onset)
    now = median_step_ms(connection, run_id, *recent)
    warm = first_step(connection, run_id) + WARM_UP_STEPS
    if onset is not None:
        lo, hi = max(warm, onset - BASELINE_STEPS), onset - 1
    else:
        lo, hi = warm, warm + RECENT_STEPS - 1
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
        places = (np.arange(first, first + planes["step"].shape[1]) - lo) // size
        slowest = quiet(np.nanmax, planes["step"], axis=0)
        for column in np.unique(places).tolist():
            chosen = places == column
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
