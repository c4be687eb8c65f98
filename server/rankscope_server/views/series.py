"""Numbers of training over steps: what the script logged and what hooks saw."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope_server import tables
from rankscope_server.shapes import (
    Capped,
    MetricsAnswer,
    MetricSeries,
)
from rankscope_server.views.steps import bin_of

Array = np.ndarray[Any, np.dtype[Any]]
MAX_SERIES = 256
MAX_POINTS = 400_000


def metrics(connection: sa.Connection, run_id: str, names: list[str], width: int) -> MetricsAnswer:
    """Return the numbers that the script logged, in bins of steps."""
    table = tables.metric.c
    all_names = list(
        connection.scalars(
            sa.select(table.name).where(table.run_id == run_id).distinct().order_by(table.name)
        )
    )
    wanted = [name for name in names if name in all_names] if names else all_names
    points: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    rows = connection.execute(
        sa.select(table.name, table.rank, table.step, table.value)
        .where(table.run_id == run_id, table.name.in_(wanted))
        # Later attempts come last: where steps were repeated, what was kept counts.
        .order_by(table.name, table.rank, table.attempt, table.step)
        .limit(MAX_POINTS)
    )
    for name, rank, step, value in rows:
        points[name, rank][step] = np.nan if value is None else value
    series = [
        _metric_series(name, rank, values, width)
        for (name, rank), values in list(points.items())[:MAX_SERIES]
    ]
    capped = Capped(shown=MAX_SERIES, total=len(points)) if len(points) > MAX_SERIES else None
    return MetricsAnswer(names=all_names, series=series, capped=capped)


def _metric_series(name: str, rank: int, values: dict[int, float], width: int) -> MetricSeries:
    steps = np.array(sorted(values), np.int64)
    numbers = np.array([values[step] for step in steps.tolist()])
    size = bin_of(len(steps), width)
    starts = np.arange(0, len(steps), size)
    ends = np.append(starts[1:], len(steps)) - 1
    return MetricSeries(
        name=name, rank=rank, step=steps[ends].tolist(), value=_rounded(numbers[ends]),
        min=_rounded(np.fmin.reduceat(numbers, starts)),
        max=_rounded(np.fmax.reduceat(numbers, starts)),
    )  # fmt: skip


def _rounded(values: Array) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]
