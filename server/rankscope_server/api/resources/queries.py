"""Resources and numbers of training of all ranks, reduced to bands and the worst lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope.wire.metric_names import METRICS
from rankscope.wire.schema import IMPORTED
from rankscope_server.answers import capped, json_object
from rankscope_server.api.resources import words
from rankscope_server.api.resources.grid import (
    Array,
    Deviations,
    Grid,
    Lines,
    deviations_of,
    on_grid,
    quiet,
)
from rankscope_server.api.resources.quantities import QUANTITIES, Quantity
from rankscope_server.api.resources.reading import (
    Read,
    Series,
    Thing,
    names_of,
    read_numbers,
    read_samples,
)
from rankscope_server.api.resources.schema import PinnedLine, ResourceChart, Resources
from rankscope_server.api.runs.queries import RANK_HEAD, rank_rows
from rankscope_server.store import tables

USUAL_NS = 15 * 60 * 10**9  # the time that is shown where none is asked for: the newest
MAX_OWN = 6  # numbers of the script's own
MAX_ASKED, MAX_NAMED, MAX_WORST = 4, 2, 3
LEAST_SCORE = 1.0  # what is closer to its peers is not worth a line
_OURS = frozenset(metric.name for metric in METRICS) | {
    column for one in QUANTITIES for column in one.columns
}
_GIVEN, _SUMMED = "job_tokens_given", "job_tokens"  # a sum counts tokens that ranks share twice
_OVER = frozenset(("ended", "failed"))


@dataclass(frozen=True, slots=True)
class _Job:
    """What charts need to know of the run."""

    world_size: int
    host_of: Mapping[int, str]
    asked: Sequence[int]
    named: Sequence[int]  # by open findings


def resources(
    connection: sa.Connection,
    run: sa.Row[Any],
    ranks: Sequence[int],
    between: tuple[int | None, int | None],
    width: int,
) -> Resources:
    """Return all quantities on one grid of time, by default of the newest quarter of an hour."""
    host_of = {
        row.rank: row.host for row in rank_rows(connection, run.run_id, run.attempt, RANK_HEAD)
    }
    end_ns = between[1] if between[1] is not None else max(run.last_seen_ns, run.ended_ns or 0)
    begin_ns = between[0] if between[0] is not None else max(end_ns - USUAL_NS, 0)
    every = [*QUANTITIES, *_own(connection, run.run_id)]
    read = Read()
    read_samples(connection, run.run_id, every, (begin_ns, end_ns), read)
    read_numbers(connection, run.run_id, every, host_of, (begin_ns, end_ns), read)
    grid = _grid(read, width)
    job = _Job(run.world_size or len(host_of), host_of, ranks[:MAX_ASKED], _named(connection, run))
    charts = [
        _chart(one, series, grid, job)
        for one in every if len(series := _known_of(one, read.series)) > one.is_sum
    ]  # fmt: skip
    if any(chart.key == _GIVEN for chart in charts):
        charts = [chart for chart in charts if chart.key != _SUMMED]
    apart = sorted(
        ((chart, line) for chart in charts for line in chart.pinned if line.stands_apart),
        key=lambda pair: -_distance(*pair),
    )
    known = {chart.key for chart in charts}
    return Resources(
        text=words.first_sentence(charts, apart),
        attempt=run.attempt,
        is_over=run.status in _OVER or run.launcher == IMPORTED,
        bin_ms=grid.bin_ns / 1e6,
        time_ms=[(grid.begin_ns + place * grid.bin_ns) / 1e6 for place in range(grid.count)],
        step=_steps(grid, read.steps),
        charts=charts,
        missing=[one.title for one in QUANTITIES if one.key not in known and one.scope != "job"],
        left_out=read.left_out,
    )


def _own(connection: sa.Connection, run_id: str) -> list[Quantity]:
    """Return the numbers that only the script gives."""
    names = [name for name in names_of(connection, run_id) if name not in _OURS]
    return [
        Quantity(
            f"own/{name}", name, "training", "rank", "metric", (name,),
            "bytes" if name.endswith("_bytes") else "ratio" if name.endswith("_ratio") else "",
            "apart", "what the script gives to rankscope.log_metrics",
        )
        for name in names[:MAX_OWN]
    ]  # fmt: skip


def _named(connection: sa.Connection, run: sa.Row[Any]) -> list[int]:
    """Return the ranks that open findings above info name, the newest findings first."""
    table = tables.finding.c
    rows = connection.execute(
        sa.select(table.body)
        .where(table.run_id == run.run_id, table.attempt == run.attempt)
        .where(table.state != "recovered")
        .order_by(table.id.desc())
    )
    bodies = [json_object(row.body) for row in rows]
    ranks = [
        rank for body in bodies if body.get("severity") in ("critical", "warning")
        for rank in body.get("ranks", [])
    ]  # fmt: skip
    return list(dict.fromkeys(ranks))[:MAX_NAMED]


def _grid(read: Read, width: int) -> Grid:
    """Return slices over what was read, no finer than once a second."""
    edges = [
        (int(times[0]), int(times[-1]))
        for series in read.series.values() for times, _ in series.values() if len(times)
    ]  # fmt: skip
    if not edges:
        return Grid(0, 1, 0)
    begin, end = min(edge[0] for edge in edges), max(edge[1] for edge in edges)
    bin_ns = max((end - begin) // max(width, 1) + 1, 10**9)
    return Grid(begin, bin_ns, int((end - begin) // bin_ns) + 1)


def _steps(grid: Grid, steps: Sequence[tuple[Array, Array]]) -> list[int | None]:
    """Return the newest step by the end of each slice; None before the first."""
    newest = np.full(grid.count, -1, np.int64)
    for times, numbers in steps:
        places = grid.of(times)
        inside = (places >= 0) & (places < grid.count)
        np.maximum.at(newest, places[inside], numbers[inside])
    held = np.maximum.accumulate(newest) if grid.count else newest
    return [step if step >= 0 else None for step in held.tolist()]


def _known_of(quantity: Quantity, series: Mapping[str, Series]) -> Series:
    """Return the series of a quantity of which any value is known."""
    every = series.get(quantity.key, {})
    return {thing: one for thing, one in every.items() if not np.isnan(one[1]).all()}


def _chart(quantity: Quantity, series: Series, grid: Grid, job: _Job) -> ResourceChart:
    things = sorted(series, key=lambda thing: (thing.number, thing.host))
    lines = on_grid(grid, [series[thing] for thing in things])
    expected = {
        "rank": job.world_size, "job": job.world_size, "node": len(set(job.host_of.values())),
    }.get(quantity.scope)  # fmt: skip
    if quantity.is_sum:
        low = high = np.full(grid.count, np.nan)
        median = lines.last.sum(axis=0)  # of a slice in which one lacks: unknown
        pinned: list[PinnedLine] = []
        num_apart = 0
    else:
        low, high = quiet(np.nanmin, lines.low, 0), quiet(np.nanmax, lines.high, 0)
        median = quiet(np.nanmedian, lines.last, 0)
        pinned, num_apart = _pinned(quantity, things, lines, job)
    usual = float(quiet(np.nanmedian, median, 0)) if len(median) else np.nan
    shown_apart = sum(line.stands_apart for line in pinned)
    return ResourceChart(
        key=quantity.key,
        title=quantity.title,
        topic=quantity.topic,
        scope=quantity.scope,
        scope_text=words.scope_text(quantity, things, expected),
        source_text=quantity.source,
        unit=quantity.unit,
        worst=quantity.worst,
        num=len(things),
        expected=expected,
        low=_known(low),
        median=_known(median),
        high=_known(high),
        usual=None if np.isnan(usual) else usual,
        pinned=pinned,
        pinned_capped=capped(shown_apart, num_apart),
    )


def _pinned(
    quantity: Quantity, things: Sequence[Thing], lines: Lines, job: _Job
) -> tuple[list[PinnedLine], int]:
    """Return the lines asked for, those of findings, and the worst; how many are outliers."""
    if len(things) < 2:
        return [], 0
    deviations = deviations_of(lines, quantity.worst)
    places = {thing: place for place, thing in enumerate(things)}
    chosen: dict[int, str] = {}
    for ranks, why in ((job.asked, "asked for"), (job.named, "named by a finding")):
        for rank in ranks:
            own = Thing(job.host_of.get(rank, ""), rank if quantity.scope == "rank" else -1)
            if quantity.scope in ("rank", "node") and own in places:
                chosen.setdefault(places[own], why)
    order = np.lexsort(
        (-deviations.scores, ~deviations.apart)
    )  # those that are off all the time first
    for place in [int(one) for one in order if deviations.scores[one] >= LEAST_SCORE][:MAX_WORST]:
        chosen.setdefault(place, "worst")
    found = [
        _line(quantity, things[place], place, deviations, why) for place, why in chosen.items()
    ]
    return found, int(deviations.apart.sum())


def _line(
    quantity: Quantity, thing: Thing, place: int, deviations: Deviations, why: Any
) -> PinnedLine:
    values = deviations.lines[place]
    is_apart = bool(deviations.apart[place])
    by_slice = why == "worst" and not is_apart
    value = float((deviations.furthest if by_slice else deviations.typical)[place])
    return PinnedLine(
        label=words.label(quantity.scope, thing),
        rank=thing.number if quantity.scope == "rank" and thing.number >= 0 else None,
        host=thing.host,
        why=why,
        stands_apart=is_apart,
        value=None if np.isnan(value) else value,
        values=_known(values),
    )


def _distance(chart: ResourceChart, line: PinnedLine) -> float:
    """Return how far a line is from its peers, as a share of what is usual."""
    if line.value is None or chart.usual is None:
        return 0.0
    return abs(line.value - chart.usual) / max(abs(chart.usual), 1e-12)


def _known(values: Array) -> list[float | None]:
    rounded = [float(f"{value:.6g}") for value in values.tolist()]
    return [value if np.isfinite(value) else None for value in rounded]
