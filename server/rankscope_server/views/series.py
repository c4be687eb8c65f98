"""Numbers over time or steps: host and GPU samples, and what the script logged."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope.chunk import decode_chunk
from rankscope.schema import CHUNK_COLUMNS
from rankscope_server import tables
from rankscope_server.problems import Problem
from rankscope_server.shapes import (
    Capped,
    MetricsAnswer,
    MetricSeries,
    Samples,
    SampleSeries,
)
from rankscope_server.views.steps import bin_of

Array = np.ndarray[Any, np.dtype[Any]]
MAX_CHUNKS = 5_000
MAX_SERIES = 256
MAX_POINTS = 400_000
_UNITS = {
    "_ratio": "ratio",
    "_bytes": "bytes",
    "_mhz": "MHz",
    "_watts": "W",
    "_celsius": "\N{DEGREE SIGN}C",
}


def samples(
    connection: sa.Connection,
    run_id: str,
    kind: str,
    hosts: list[str],
    names: list[str],
    from_ms: float | None,
    to_ms: float | None,
    width: int,
) -> Samples:
    """Return least and largest value per slice of time. Raises Problem 422."""
    if kind not in {"host", "gpu"}:
        raise Problem(422, f"kind {kind[:20]!r} is not known", "kind", "use host or gpu")
    known_names = [name for name in CHUNK_COLUMNS[kind] if name not in {"time_ns", "gpu"}]
    wanted = [name for name in names if name in known_names] or known_names
    columns, capped = _sample_columns(connection, run_id, kind, hosts, from_ms, to_ms)
    series = []
    for (host, gpu), parts in sorted(
        columns.items(), key=lambda item: (item[0][0], item[0][1] or 0)
    ):
        joined = {name: np.concatenate(values) for name, values in parts.items()}
        for name in wanted:
            series.append(_sample_series(host, gpu, name, joined, width))
    if len(series) > MAX_SERIES:
        capped = Capped(shown=MAX_SERIES, total=len(series))
    return Samples(
        hosts=sorted({host for host, _ in columns}), names=known_names,
        series=series[:MAX_SERIES], capped=capped,
    )  # fmt: skip


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


def _sample_columns(
    connection: sa.Connection,
    run_id: str,
    kind: str,
    hosts: list[str],
    from_ms: float | None,
    to_ms: float | None,
) -> tuple[dict[tuple[str, int | None], dict[str, list[Array]]], Capped | None]:
    table = tables.chunk
    lo, hi = _to_ns(from_ms, 0), _to_ns(to_ms, (1 << 62))
    where = [
        table.c.run_id == run_id, table.c.kind == kind, table.c.time_hi_ns >= lo,
        table.c.time_lo_ns <= hi,
    ]  # fmt: skip
    if hosts:
        where.append(table.c.host.in_(hosts))
    total = connection.scalar(sa.select(sa.func.count()).select_from(table).where(*where)) or 0
    rows = connection.execute(
        sa.select(table.c.host, table.c.data)
        .where(*where)
        .order_by(table.c.time_hi_ns.desc())
        .limit(MAX_CHUNKS)
    )
    found: dict[tuple[str, int | None], dict[str, list[Array]]] = {}
    for host, data in rows:
        columns = {name: np.asarray(values) for name, values in decode_chunk(data).items()}
        inside = (columns["time_ns"] >= lo) & (columns["time_ns"] <= hi)
        devices = columns.get("gpu", np.full(len(inside), -1))
        for device in np.unique(devices[inside]).tolist():
            chosen = inside & (devices == device)
            target = found.setdefault((host, None if device < 0 else device), {})
            for name, values in columns.items():
                target.setdefault(name, []).append(values[chosen])
    capped = Capped(shown=MAX_CHUNKS, total=int(total)) if total > MAX_CHUNKS else None
    return found, capped


def _to_ns(ms: float | None, default: int) -> int:
    return default if ms is None else int(ms * 1e6)


def _sample_series(
    host: str, gpu: int | None, name: str, columns: dict[str, Array], width: int
) -> SampleSeries:
    times, values = columns["time_ns"], columns[name].astype(np.float64)
    order = np.argsort(times, kind="stable")
    times, values = times[order], values[order]
    slices = min(max(width, 1), 4_096)
    span = max(int(times[-1] - times[0]), 1)
    places = np.arange(len(times))
    if len(times) > slices:
        places = ((times - times[0]) / span * (slices - 1)).astype(np.int64)
    _, starts = np.unique(places, return_index=True)
    unit = next((unit for ending, unit in _UNITS.items() if name.endswith(ending)), "")
    return SampleSeries(
        host=host, gpu=gpu, name=name, unit=unit, time_ms=(times[starts] / 1e6).tolist(),
        min=_rounded(np.fmin.reduceat(values, starts)),
        max=_rounded(np.fmax.reduceat(values, starts)),
    )  # fmt: skip


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
