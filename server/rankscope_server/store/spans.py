"""Which samples of which machine there are, from when to when: so that no page scans chunks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sqlalchemy as sa

from rankscope.wire.sample_columns import SAMPLE_KINDS
from rankscope_server.store import tables
from rankscope_server.store.engine import upsert


def add_spans(connection: sa.Connection, run_id: str, chunks: Iterable[Mapping[str, Any]]) -> None:
    """Count the samples among the rows of these chunks."""
    table = tables.sample_span.c
    found: dict[tuple[str, str], tuple[int, int, int]] = {}
    for chunk in chunks:
        if chunk["kind"] in SAMPLE_KINDS:
            key, times = (chunk["host"], chunk["kind"]), (chunk["time_lo_ns"], chunk["time_hi_ns"])
            lo, hi, count = found.get(key, (*times, 0))
            found[key] = (min(lo, times[0]), max(hi, times[1]), count + chunk["count"])
    if not found:
        return
    stored = connection.execute(
        sa.select(table.host, table.kind, table.time_lo_ns, table.time_hi_ns, table["count"])
        .where(table.run_id == run_id, table.host.in_({host for host, _ in found}))
    )  # fmt: skip
    before = {(host, kind): (lo, hi, count) for host, kind, lo, hi, count in stored}
    rows = []
    for (host, kind), (lo, hi, count) in found.items():
        old = before.get((host, kind), (lo, hi, 0))
        rows.append(
            {
                "run_id": run_id, "host": host, "kind": kind, "time_lo_ns": min(lo, old[0]),
                "time_hi_ns": max(hi, old[1]), "count": count + old[2],
            }
        )  # fmt: skip
    upsert(connection, tables.sample_span, rows, ("time_lo_ns", "time_hi_ns", "count"))
