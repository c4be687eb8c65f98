"""Samples of machines over time: rates of counters, and gaps shown as gaps."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import sqlalchemy as sa

from rankscope.wire.sample_columns import (
    EVERY_SAMPLE,
    SAMPLE_COLUMNS,
    SAMPLE_KEYS,
    SAMPLE_STRING_COLUMNS,
    is_counter,
)
from rankscope_server.answers import LeftOut, capped
from rankscope_server.api.machines.schema import Samples, SampleSeries
from rankscope_server.problems import Problem
from rankscope_server.store import tables
from rankscope_server.store.chunks import PLACE, decoded

Array = np.ndarray[Any, np.dtype[Any]]
Key: TypeAlias = tuple[str, tuple[int | str, ...]]  # host, and what distinguishes its rows
MAX_CHUNKS = 5_000
MAX_SERIES = 256
_GAP_INTERVALS, _GAP_SECONDS = 2.5, 1.0  # a row that comes later than this was missed
_UNITS = {
    "_ratio": "ratio",
    "_bytes": "bytes",
    "_bytes_per_second": "bytes/s",
    "_mhz": "Hz",
    "_mbps": "bit/s",
    "_gbps": "bit/s",
    "_watts": "W",
    "_celsius": "\N{DEGREE SIGN}C",
    "_cores": "cores",
}
_SIZES = {"_mhz": 1e6, "_mbps": 1e6, "_gbps": 1e9}  # of what is not sent in the unit itself
# what a counter's name ends with: the unit of its rate, and the factor to it
_RATES = {
    "_us_total": ("ratio", 1e-6),
    "_mj_total": ("W", 1e-3),
    "_bytes_total": ("bytes/s", 1.0),
    "_total": ("1/s", 1.0),
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
    if kind not in SAMPLE_COLUMNS:
        remedy = f"use one of {', '.join(SAMPLE_COLUMNS)}"
        raise Problem(422, f"kind {kind[:20]!r} is not known", "kind", remedy)
    keys = SAMPLE_KEYS[kind]
    known = [name for name in SAMPLE_COLUMNS[kind] if name not in (*EVERY_SAMPLE, *keys)]
    wanted = [name for name in names if name in known] or known
    reader = Reader(connection, run_id, kind, hosts, (_to_ns(from_ms, 0), _to_ns(to_ms, 1 << 62)))
    parts = [(key, name, columns) for key, columns in reader.read(wanted) for name in wanted]
    shown = parts[:MAX_SERIES]
    what = f"older parts of the samples: one answer reads {MAX_CHUNKS:,}, ask for fewer hosts"
    return Samples(
        hosts=sorted({host for (host, _), _, _ in parts}),
        names=known,
        series=[_series(kind, key, name, columns, width) for key, name, columns in shown],
        capped=capped(len(shown), len(parts)),
        left_out=[LeftOut(what=what, count=reader.num_older)] if reader.num_older else [],
    )


class Reader:
    """Takes chunks apart into one set of columns for each thing that was sampled."""

    def __init__(
        self, connection: sa.Connection, run_id: str, kind: str, hosts: list[str],
        between: tuple[int, int],
    ) -> None:  # fmt: skip
        self._connection = connection
        self._kind = kind
        self._between = between
        table = tables.chunk.c
        self._where = [
            table.run_id == run_id, table.kind == kind, table.time_hi_ns >= between[0],
            table.time_lo_ns <= between[1],
        ]  # fmt: skip
        if hosts:
            self._where.append(table.host.in_(hosts))
        self.num_older = 0  # chunks that were not read

    def read(self, wanted: list[str]) -> list[tuple[Key, dict[str, Array]]]:
        """Return the columns of each thing, in the order of time; the newest where many are."""
        table = tables.chunk
        total = self._connection.scalar(
            sa.select(sa.func.count()).select_from(table).where(*self._where)
        )
        rows = self._connection.execute(
            sa.select(table.c.host, *PLACE)
            .where(*self._where)
            .order_by(table.c.time_hi_ns.desc())
            .limit(MAX_CHUNKS)
        ).all()
        self.num_older = max(int(total or 0) - MAX_CHUNKS, 0)
        keys = SAMPLE_KEYS[self._kind]
        names = {*EVERY_SAMPLE, *keys, *wanted}
        parts: dict[str, dict[str, list[Array]]] = {}
        for row, sent in decoded(self._connection, rows, names):
            target = parts.setdefault(row.host, {name: [] for name in names})
            for name in names:
                values = sent[name] if name in sent else np.full(len(sent["time_ns"]), -1)
                target[name].append(np.asarray(values))
        found: list[tuple[Key, dict[str, Array]]] = []
        for host, columns in sorted(parts.items()):
            whole = {name: np.concatenate(values) for name, values in columns.items()}
            found += [((host, key), part) for key, part in self._split(whole, keys)]
        return found

    def _split(
        self, columns: dict[str, Array], keys: tuple[str, ...]
    ) -> list[tuple[tuple[int | str, ...], dict[str, Array]]]:
        """Return the rows of each sampled thing, in the order of time; each time once."""
        times = columns["time_ns"]
        inside = (times >= self._between[0]) & (times <= self._between[1])
        columns = {name: values[inside] for name, values in columns.items()}
        code = np.zeros(int(inside.sum()), np.int64)
        for key in keys:
            words, places = np.unique(columns[key], return_inverse=True)
            code = code * len(words) + places
        found = []
        for number in np.unique(code):
            rows = np.flatnonzero(code == number)
            _, first = np.unique(columns["time_ns"][rows], return_index=True)
            mine = {name: values[rows[first]] for name, values in columns.items()}
            found.append((tuple(mine[key][0].item() for key in keys), mine))
        return found


def _series(kind: str, key: Key, name: str, columns: dict[str, Array], width: int) -> SampleSeries:
    host, parts = key
    times = columns["time_ns"]
    values = columns[name].astype(np.float64)
    values = np.where(values < 0, np.nan, values)
    gap_after = missed(times, columns["interval_ns"])
    unit, factor = _unit(name)
    if is_counter(name):
        values = rates(times, values, gap_after)
    values = values * factor
    slices = min(max(width, 1), 4_096)
    places = np.arange(len(times))
    if len(times) > slices:
        span = max(int(times[-1] - times[0]), 1)
        places = ((times - times[0]) / span * (slices - 1)).astype(np.int64)
    _, starts = np.unique(places, return_index=True)
    least, largest = np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)
    # A gap within one slice cannot be seen at this width.
    gaps = np.flatnonzero(gap_after[starts[1:] - 1]) + 1 if len(starts) > 1 else np.array([], int)
    between = (times[starts[gaps] - 1] + times[starts[gaps]]) // 2
    numbers = dict(zip(SAMPLE_KEYS[kind], parts, strict=True))
    gpu = numbers.get("gpu")
    return SampleSeries(
        host=host, gpu=gpu if isinstance(gpu, int) else None, label=_label(numbers),
        name=name.removesuffix("_total").removesuffix("_us").removesuffix("_mj"), unit=unit,
        time_ms=(np.insert(times[starts], gaps, between) / 1e6).tolist(),
        min=_known(np.insert(least, gaps, np.nan)), max=_known(np.insert(largest, gaps, np.nan)),
    )  # fmt: skip


def missed(times: Array, intervals: Array) -> Array:
    """Return for each row whether rows are missing between it and the next."""
    expected = np.maximum(intervals[:-1], intervals[1:])
    return np.diff(times) > expected * _GAP_INTERVALS + _GAP_SECONDS * 1e9


def rates(times: Array, values: Array, gap_after: Array) -> Array:
    """Return differences per second; unknown over a gap and where a counter began anew."""
    if len(values) < 2:
        return np.full(len(values), np.nan)
    found = np.diff(values) / (np.diff(times) / 1e9)
    found[(found < 0) | gap_after] = np.nan
    return np.concatenate(([np.nan], found))


def _unit(name: str) -> tuple[str, float]:
    for ending, (unit, factor) in _RATES.items():
        if name.endswith(ending):
            return unit, factor
    ending = next((ending for ending in _UNITS if name.endswith(ending)), "")
    return _UNITS.get(ending, ""), _SIZES.get(ending, 1.0)


def _label(numbers: dict[str, int | str]) -> str:
    """Return for example "eth0", "GPU 0, link 3", "rank 5, pid 4711"."""
    words = {"gpu": "GPU", "link": "link", "rank": "rank", "pid": "pid"}
    return ", ".join(
        str(value) if name in SAMPLE_STRING_COLUMNS else f"{words[name]} {value}"
        for name, value in numbers.items()
    )


def _to_ns(ms: float | None, default: int) -> int:
    return default if ms is None else int(ms * 1e6)


def _known(values: Array) -> list[float | None]:
    known = values.astype(object)
    known[~np.isfinite(values)] = None
    found: list[float | None] = known.tolist()
    return found
