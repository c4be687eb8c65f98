"""Numbers of training over steps: what the script logged and what hooks saw."""

from __future__ import annotations

from collections import defaultdict
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
    keys, total = _series_of(connection, where, merged=merged)
    if keys:  # the first ones in this order
        name, of_rank = keys[-1]
        is_before = table.name < name
        is_last = table.name == name
        where.append(is_before | (is_last if merged else is_last & (table.rank <= of_rank)))
    points = _merged_points(connection, where) if merged else _points(connection, where)
    series = [_metric_series(*key, points[key], width) for key in keys]
    return MetricsAnswer(names=all_names, series=series, capped=capped(len(series), total))


# by (name, rank) and step: value, least, largest; NaN where none was finite
_Points: TypeAlias = dict[tuple[str, int], dict[int, tuple[float, float, float]]]


def _series_of(
    connection: sa.Connection, where: list[sa.ColumnElement[bool]], *, merged: bool
) -> tuple[list[tuple[str, int]], int]:
    """Return (name, rank) of the series to show, -1 for all ranks, and how many there are."""
    table = tables.metric.c
    of_rank = sa.literal(-1).label("of_rank") if merged else table.rank.label("of_rank")
    by = (table.name,) if merged else (table.name, table.rank)
    num_points = sa.func.count(table.step.distinct()) if merged else sa.func.count()
    rows = connection.execute(
        sa.select(table.name, of_rank, num_points).where(*where).group_by(*by).order_by(*by)
    ).all()
    chosen: list[tuple[str, int]] = []
    points = 0
    for name, rank, count in rows[:MAX_SERIES]:
        points += count
        if points > MAX_POINTS and chosen:
            break
        chosen.append((name, rank))
    return chosen, len(rows)


def _points(connection: sa.Connection, where: list[sa.ColumnElement[bool]]) -> _Points:
    table = tables.metric.c
    points: _Points = defaultdict(dict)
    rows = connection.execute(
        sa.select(table.name, table.rank, table.step, table.value)
        .where(*where)
        # Later attempts come last: where steps were repeated, what was kept counts.
        .order_by(table.name, table.rank, table.attempt, table.step)
    )
    for name, rank, step, value in rows:
        points[name, rank][step] = (np.nan if value is None else value,) * 3
    return points


def _merged_points(connection: sa.Connection, where: list[sa.ColumnElement[bool]]) -> _Points:
    """Return the mean, least and largest value over the ranks; the rank is -1."""
    table, over = tables.metric.c, sa.func
    points: _Points = defaultdict(dict)
    rows = connection.execute(
        sa.select(
            table.name, table.step, over.avg(table.value), over.min(table.value),
            over.max(table.value),
        )
        .where(*where)
        .group_by(table.name, table.attempt, table.step)
        .order_by(table.name, table.attempt, table.step)
    )  # fmt: skip
    for name, step, *values in rows:
        mean, least, largest = (np.nan if value is None else value for value in values)
        points[name, -1][step] = mean, least, largest
    return points


def _metric_series(
    name: str, rank: int, values: dict[int, tuple[float, float, float]], width: int
) -> MetricSeries:
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
