"""Numbers of training over steps: what the script logged and what hooks saw."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import sqlalchemy as sa

from rankscope_server.answers import capped
from rankscope_server.api.steps.queries import bin_of, known
from rankscope_server.api.steps.schema import MetricsAnswer, MetricSeries
from rankscope_server.store import tables

Array = np.ndarray[Any, np.dtype[Any]]
MAX_SERIES = 256
MAX_POINTS = 400_000


def metrics(
    connection: sa.Connection,
    run_id: str,
    names: list[str],
    width: int,
    *,
    rank: int | None = None,
    merged: bool = False,
) -> MetricsAnswer:
    """Return the numbers of training in bins of steps, of each rank or `merged` over all ranks.

    A series is whole or left out.
    """
    table = tables.metric.c
    all_names = list(
        connection.scalars(
            sa.select(table.name).where(table.run_id == run_id).distinct().order_by(table.name)
        )
    )
    wanted = [name for name in names if name in all_names] if names else all_names
    where = [table.run_id == run_id, table.name.in_(wanted)]
    if rank is not None:
        where.append(table.rank == rank)
    keys = _series_of(connection, where, merged=merged)
    read = _merged_points if merged else _points
    series: list[MetricSeries] = []
    num_points = 0
    for key, count in keys[:MAX_SERIES]:
        num_points += count
        if num_points > MAX_POINTS and series:
            break
        series.append(
            _metric_series(*key, read(connection, [*where, table.name == key[0]], key[1]), width)
        )
    return MetricsAnswer(names=all_names, series=series, capped=capped(len(series), len(keys)))


_Points: TypeAlias = dict[int, tuple[float, float, float]]
"""By step: value, least, largest; NaN where none was finite."""


def _series_of(
    connection: sa.Connection, where: list[sa.ColumnElement[bool]], *, merged: bool
) -> list[tuple[tuple[str, int], int]]:
    """Return (name, rank) and the number of stored points of each series; -1 for all ranks."""
    table = tables.metric.c
    of_rank = sa.literal(-1).label("of_rank") if merged else table.rank.label("of_rank")
    by = (table.name,) if merged else (table.name, table.rank)
    rows = connection.execute(
        sa.select(table.name, of_rank, sa.func.count()).where(*where).group_by(*by).order_by(*by)
    )
    return [((name, rank), count) for name, rank, count in rows]


def _points(connection: sa.Connection, where: list[sa.ColumnElement[bool]], rank: int) -> _Points:
    table = tables.metric.c
    rows = connection.execute(
        sa.select(table.step, table.value)
        .where(*where, table.rank == rank)
        # Later attempts come last: where steps were repeated, what was kept counts.
        .order_by(table.attempt, table.step)
    )
    return {step: (np.nan if value is None else value,) * 3 for step, value in rows}


def _merged_points(
    connection: sa.Connection, where: list[sa.ColumnElement[bool]], _rank: int
) -> _Points:
    """Return the mean, least and largest value over the ranks."""
    table, over = tables.metric.c, sa.func
    rows = connection.execute(
        sa.select(table.step, over.avg(table.value), over.min(table.value), over.max(table.value))
        .where(*where)
        .group_by(table.attempt, table.step)
        .order_by(table.attempt, table.step)
    )
    points: _Points = {}
    for step, *values in rows:
        mean, least, largest = (np.nan if value is None else value for value in values)
        points[step] = mean, least, largest
    return points


def _metric_series(name: str, rank: int, values: _Points, width: int) -> MetricSeries:
    steps = np.array(sorted(values), np.int64)
    numbers, least, largest = np.array([values[step] for step in steps.tolist()]).T
    size = bin_of(len(steps), width)
    starts = np.arange(0, len(steps), size)
    ends = np.append(starts[1:], len(steps)) - 1
    return MetricSeries(
        name=name, rank=rank, step=steps[ends].tolist(),
        value=[known(value) for value in numbers[ends]],
        min=[known(value) for value in np.fmin.reduceat(least, starts)],
        max=[known(value) for value in np.fmax.reduceat(largest, starts)],
    )  # fmt: skip
