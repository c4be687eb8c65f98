"""Samples and numbers of training of every rank, GPU and node, read from the store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import sqlalchemy as sa

from rankscope.wire.sample_columns import SAMPLE_KEYS, is_counter
from rankscope_server.answers import LeftOut
from rankscope_server.api.machines.samples import MAX_CHUNKS, Reader, missed, rates
from rankscope_server.api.resources.quantities import Quantity
from rankscope_server.store import tables

Array = np.ndarray[Any, np.dtype[Any]]
MAX_NUMBERS = 200_000  # of one quantity in one answer
MAX_RANKS_NAMED = 16_384  # in one query: databases take some 32,000 values
_RATE_FACTORS = {"_us_total": 1e-6}


@dataclass(frozen=True, slots=True, order=True)
class Thing:
    """A rank, a GPU of a node, or a node: what has a line of its own."""

    host: str
    number: int = -1  # rank or GPU; -1: the node itself


Series: TypeAlias = dict[Thing, tuple[Array, Array]]  # times in ns, values; in the order of time


@dataclass(slots=True)
class Read:
    """What was read, by quantity; `steps` are times in ns with the step that ended then."""

    series: dict[str, Series] = field(default_factory=dict)
    steps: list[tuple[Array, Array]] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)


def read_samples(
    connection: sa.Connection, run_id: str, quantities: Sequence[Quantity],
    between: tuple[int, int], into: Read, hosts: Sequence[str] = (),
) -> None:  # fmt: skip
    """Read the quantities that machines sample, of all hosts or of some."""
    by_kind: dict[str, list[Quantity]] = defaultdict(list)
    for one in quantities:
        if one.kind != "metric":
            by_kind[one.kind].append(one)
    for kind, wanted in by_kind.items():
        reader = Reader(connection, run_id, kind, list(hosts), between)
        columns = list(dict.fromkeys(name for one in wanted for name in one.columns))
        for (host, key), part in reader.read(columns):
            numbers = dict(zip(SAMPLE_KEYS[kind], key, strict=True))
            own = numbers.get("rank", numbers.get("gpu", -1))
            thing = Thing(host, int(own))
            for one in wanted:
                _join(
                    into.series.setdefault(one.key, {}), thing, part["time_ns"], _values(one, part)
                )
        if reader.num_older:
            most = f"one answer reads {MAX_CHUNKS:,}, ask for less time"
            what = f"older parts of the samples of {kind}: {most}"
            into.left_out.append(LeftOut(what=what, count=reader.num_older))


def _values(quantity: Quantity, part: Mapping[str, Array]) -> Array:
    """Return the sum of the columns of a quantity, of counters their rates; NaN where unknown."""
    times = part["time_ns"]
    total = np.zeros(len(times))
    for name in quantity.columns:
        values = part[name].astype(np.float64)
        values[values < 0] = np.nan
        if is_counter(name):
            factor = next((f for end, f in _RATE_FACTORS.items() if name.endswith(end)), 1.0)
            values = rates(times, values, missed(times, part["interval_ns"])) * factor
        total += values
    if quantity.scope == "rank" and quantity.unit == "bytes":
        total[total == 0] = np.nan  # a process that has ended and was not reaped yet
    return total


def _join(series: Series, thing: Thing, times: Array, values: Array) -> None:
    """Add the values of a thing: a rank that was started again has several processes."""
    if thing in series:
        times = np.concatenate([series[thing][0], times])
        values = np.concatenate([series[thing][1], values])
        order = np.argsort(times, kind="stable")
        times, values = times[order], values[order]
    series[thing] = times, values


def read_numbers(
    connection: sa.Connection, run_id: str, quantities: Sequence[Quantity],
    host_of: Mapping[int, str], between: tuple[int, int], into: Read,
) -> None:  # fmt: skip
    """Read the numbers of training that quantities show, each once."""
    by_name: dict[str, list[Quantity]] = defaultdict(list)
    for one in quantities:
        if one.kind == "metric":
            by_name[one.columns[0]].append(one)
    for name, wanted in by_name.items():
        series = _numbers(connection, run_id, name, wanted[0].title, host_of, between, into)
        for one in wanted:
            into.series[one.key] = series


def names_of(connection: sa.Connection, run_id: str) -> list[str]:
    """Return the names of all numbers of training of a run."""
    table = tables.metric.c
    found = sa.select(table.name).where(table.run_id == run_id).distinct().order_by(table.name)
    return list(connection.scalars(found))


def _numbers(
    connection: sa.Connection, run_id: str, name: str, title: str, host_of: Mapping[int, str],
    between: tuple[int, int], into: Read,
) -> Series:  # fmt: skip
    table = tables.metric.c
    of_name = (table.run_id == run_id, table.name == name)
    inside = (table.time_ns >= between[0], table.time_ns <= between[1])
    first = connection.scalar(sa.select(sa.func.min(table.rank)).where(*of_name))
    if first is None:
        return {}
    steps = connection.scalars(
        sa.select(table.step).where(*of_name, table.rank == first, *inside).order_by(table.step)
    ).all()
    most = max(MAX_NUMBERS // max(len(host_of), 1), 2)
    where = [*of_name, *inside]
    if len(steps) > most:
        where.append(table.step >= steps[-most])
        most_text = f"one answer reads {MAX_NUMBERS:,} numbers"
        what = f"steps of {title!r} before {steps[-most]:,}: {most_text}"
        into.left_out.append(LeftOut(what=what, count=None))
    if len(host_of) <= MAX_RANKS_NAMED:  # the index is by name, rank and step
        where.append(table.rank.in_([-1, *sorted(host_of)]))
    rows = connection.execute(
        sa.select(table.rank, table.time_ns, table.step, table.value)
        .where(*where)
        .order_by(table.rank, table.time_ns)
    ).all()
    if not rows:
        return {}
    rank, times, step = (np.array([row[i] for row in rows], np.int64) for i in range(3))
    values = np.array([np.nan if row[3] is None else row[3] for row in rows])
    into.steps.append((times, step))
    starts = np.flatnonzero(np.diff(rank, prepend=rank[0] - 1))
    found: Series = {}
    for begin, end in zip(starts, np.append(starts[1:], len(rank)), strict=True):
        number = int(rank[begin])
        thing = Thing(host_of.get(number, ""), number)
        found[thing] = times[begin:end], values[begin:end]
    return found
