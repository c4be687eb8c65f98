"""Which samples of which machine there are, from when to when, and how busy it was in them.

So that no page scans chunks. How busy processors and GPUs were is added up as samples come, each
batch once: it outlives the samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope.wire.chunk import Column
from rankscope.wire.sample_columns import SAMPLE_KINDS
from rankscope.wire.schema import Chunk
from rankscope_server.store import tables
from rankscope_server.store.engine import upsert

_MOST_US = 120 * 10**6  # between two samples of which one time is still known
_COLUMNS = ("time_lo_ns", "time_hi_ns", "count", "known_us", "busy_us", "counter_us")


@dataclass(frozen=True, slots=True)
class Span:
    """Samples of one kind of one machine.

    `known_us` is the time of a host, or of all its GPUs, of which it is known how busy they were;
    `counter_us` what the counters of a host's processors were at last, -1 where not known.
    """

    time_lo_ns: int
    time_hi_ns: int
    count: int
    known_us: int = 0
    busy_us: int = 0
    counter_us: int = -1

    def joined(self, later: Span) -> Span:
        """Return this one with another."""
        newest = max(self, later, key=lambda span: span.time_hi_ns)
        return Span(
            min(self.time_lo_ns, later.time_lo_ns), newest.time_hi_ns, self.count + later.count,
            self.known_us + later.known_us, self.busy_us + later.busy_us, newest.counter_us,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Samples:
    """What of a chunk of samples counts."""

    host: str
    kind: str
    span: Span
    times_ns: tuple[int, ...] = ()  # of counters of a host, ascending
    counters_us: tuple[int, ...] = ()

    def after(self, before: Span | None) -> Span:
        """Return what a chunk says, with the time since the sample before it where that is known.

        A chunk that comes late is counted from its own first sample on.
        """
        times, counters = self.times_ns, self.counters_us
        if not times:
            return self.span
        if before is not None and before.counter_us >= 0 and before.time_hi_ns < times[0]:
            times, counters = (before.time_hi_ns, *times), (before.counter_us, *counters)
        took = np.diff(np.array(times, np.int64)) // 1000
        used = np.diff(np.array(counters, np.int64))
        # A counter of a machine that was started again begins anew.
        good = (took > 0) & (took <= _MOST_US) & (used >= 0) & (used <= took * 3 // 2)
        busy = np.minimum(used, took)[good].sum()
        return replace(self.span, known_us=int(took[good].sum()), busy_us=int(busy),
                       counter_us=counters[-1])  # fmt: skip


def samples_of(chunk: Chunk, columns: Mapping[str, Column]) -> Samples | None:
    """Return what of a chunk counts; None for one that holds no samples."""
    if chunk.kind not in SAMPLE_KINDS:
        return None
    span = Span(chunk.time_lo_ns, chunk.time_hi_ns, chunk.count)
    if chunk.kind == "gpu":
        share, every = np.asarray(columns["utilization_ratio"]), np.asarray(columns["interval_ns"])
        known = (share >= 0) & (every > 0)
        every_us = np.minimum(every[known] // 1000, _MOST_US)
        busy_us = float((every_us * np.minimum(share[known], 1.0)).sum())
        span = replace(span, known_us=int(every_us.sum()), busy_us=int(busy_us))
    elif chunk.kind == "host":
        parts = [np.asarray(columns[f"cpu_{name}_us_total"]) for name in ("user", "system")]
        good = (parts[0] >= 0) & (parts[1] >= 0)
        times = np.asarray(columns["time_ns"])[good]
        order = np.argsort(times, kind="stable")
        counters = (parts[0] + parts[1])[good][order]
        return Samples(chunk.host, chunk.kind, span, tuple(times[order].tolist()),
                       tuple(counters.tolist()))  # fmt: skip
    return Samples(chunk.host, chunk.kind, span)


def add_spans(connection: sa.Connection, run_id: str, samples: Iterable[Samples]) -> None:
    """Count samples of a run."""
    ordered = sorted(samples, key=lambda one: one.span.time_lo_ns)
    if not ordered:
        return
    table = tables.sample_span.c
    stored = connection.execute(
        sa.select(table.host, table.kind, *(table[name] for name in _COLUMNS))
        .where(table.run_id == run_id, table.host.in_({one.host for one in ordered}))
    )  # fmt: skip
    found = {(host, kind): Span(*values) for host, kind, *values in stored}
    changed = set[tuple[str, str]]()
    for one in ordered:
        key = (one.host, one.kind)
        before = found.get(key)
        more = one.after(before)
        found[key] = more if before is None else before.joined(more)
        changed.add(key)
    rows: list[dict[str, Any]] = [
        {"run_id": run_id, "host": host, "kind": kind}
        | {name: getattr(found[host, kind], name) for name in _COLUMNS}
        for host, kind in sorted(changed)
    ]
    upsert(connection, tables.sample_span, rows, _COLUMNS)
