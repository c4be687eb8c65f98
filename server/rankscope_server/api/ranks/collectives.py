"""Collectives: sums from the rollup, or exact from the chunks of a range; and raw records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope.wire.backends import is_of_device
from rankscope.wire.chunk import Column, Words, decode_chunk, is_words
from rankscope.wire.schema import FLAG_ASYNC, FLAG_END_IS_UPPER_BOUND, FLAG_P2P, STATES
from rankscope_server.answers import capped
from rankscope_server.api.ranks.schema import (
    CollectiveRecord,
    CollectiveRecords,
    CollectiveRow,
    Collectives,
)
from rankscope_server.call_shapes import shapes_of
from rankscope_server.ingest.operations import (
    OperationKey,
    OperationSum,
    durations_of,
    sum_collectives,
)
from rankscope_server.store import tables
from rankscope_server.store.operations import sum_of_row
from rankscope_server.text import duration_text

MAX_ROWS = 500
MAX_CHUNKS = 400  # about two million events; a wider range is answered from the rollup
MAX_RECORDS = 5_000
_COUNTS = ("step", "sequence", "size_bytes", "num_tensors")
_WORDS = ("group", "operation", "dtype", "ended_by", "call_site")
_ENQUEUED_NS = 100_000  # a wait that a host enqueues for its device returns sooner


def collectives(
    connection: sa.Connection,
    run: sa.Row[Any],
    rank: int | None,
    lo: int | None,
    hi: int | None,
) -> Collectives:
    """Return what was communicated, by operation, group and size, the most exposed first."""
    if rank is None and lo is None and hi is None:
        sums = _rollup(connection, run)
    else:
        sums = _exact(connection, run, rank, lo, hi)
    members, on_device = _groups(connection, run)
    first, last = max(lo or 1, 1), min(hi or run.step, run.step)
    steps = max(last - first + 1, 1)
    rows = []
    for key, value in sums.items():
        num_ranks = members.get(key.group)
        ranks = 1 if rank is not None else (num_ranks or run.world_size or 1)
        is_known = key.group not in on_device or value.blocked_ns > _ENQUEUED_NS * value.count
        rows.append(
            CollectiveRow(
                operation=key.operation,
                group=key.group,
                num_ranks=num_ranks,
                size_bytes=key.size_bytes,
                count=value.count,
                p50_ms=value.percentile_ms(0.5),
                p99_ms=value.percentile_ms(0.99),
                max_ms=None if value.max_ns is None else value.max_ns / 1e6,
                exposed_ms_per_step=value.blocked_ns / 1e6 / steps / ranks if is_known else None,
                open=value.open,
            )
        )
    rows.sort(key=lambda row: (-(row.exposed_ms_per_step or 0), -row.count))
    return Collectives(
        rows=rows[:MAX_ROWS], text=_text(rows, run), capped=capped(MAX_ROWS, len(rows))
    )


def records(
    connection: sa.Connection,
    run: sa.Row[Any],
    rank: int | None,
    lo: int | None,
    hi: int | None,
    limit: int,
) -> CollectiveRecords:
    """Return raw records, newest first."""
    limit = min(max(limit, 1), MAX_RECORDS)
    rows: list[CollectiveRecord] = []
    total = 0
    for chunk, columns in _chunks(connection, run.run_id, rank, lo, hi, MAX_CHUNKS):
        chosen = _in_range(columns, lo, hi)
        total += len(chosen)
        if len(rows) < limit or rank is None:
            rows += [_record(chunk, columns, index) for index in chosen[::-1][:limit].tolist()]
            rows.sort(key=lambda row: -row.arrived_ms)
            rows = rows[:limit]
    return CollectiveRecords(rows=rows, capped=capped(len(rows), total))


def _rollup(connection: sa.Connection, run: sa.Row[Any]) -> dict[OperationKey, OperationSum]:
    table = tables.op_rollup
    rows = connection.execute(
        sa.select(table).where(table.c.run_id == run.run_id, table.c.attempt == run.attempt)
    )
    return {OperationKey(row.operation, row.group, row.size_bytes): sum_of_row(row) for row in rows}


def _exact(
    connection: sa.Connection, run: sa.Row[Any], rank: int | None, lo: int | None, hi: int | None
) -> dict[OperationKey, OperationSum]:
    parts = []
    for _, columns in _chunks(connection, run.run_id, rank, lo, hi, MAX_CHUNKS):
        chosen = _in_range(columns, lo, hi)
        if not len(chosen):
            continue
        part = {name: _take(column, chosen) for name, column in columns.items()}
        parts.append(durations_of(part, shapes_of(part)))
    return sum_collectives(parts)


def _take(column: Column, chosen: Any) -> Column:
    if is_words(column):
        coded = Words.of(column)
        return Words(coded.codes[chosen], coded.words)
    taken: np.ndarray[Any, Any] = column[chosen]
    return taken


def _in_range(columns: dict[str, Column], lo: int | None, hi: int | None) -> Any:
    steps = np.asarray(columns["step"])
    return np.flatnonzero((steps >= (lo or 0)) & (steps <= (hi or np.iinfo(np.int64).max)))


def _chunks(
    connection: sa.Connection,
    run_id: str,
    rank: int | None,
    lo: int | None,
    hi: int | None,
    limit: int,
) -> Iterator[tuple[sa.Row[Any], dict[str, Column]]]:
    """Yield the chunks of a range, newest first, decoded."""
    table = tables.chunk
    where = [table.c.run_id == run_id, table.c.kind == "collectives"]
    if rank is not None:
        where.append(table.c.rank == rank)
    if lo is not None:
        where.append(table.c.step_hi >= lo)
    if hi is not None:
        where.append(table.c.step_lo <= hi)
    rows = connection.execute(
        sa.select(table)
        .where(*where)
        .order_by(table.c.step_hi.desc(), table.c.id.desc())
        .limit(limit)
    )
    for row in rows:
        yield row, decode_chunk(row.data)


def _record(chunk: sa.Row[Any], columns: dict[str, Column], index: int) -> CollectiveRecord:
    def ms(name: str) -> float | None:
        value = int(columns[name][index])
        return None if value < 0 else value / 1e6

    plain: dict[str, Any] = {name: int(columns[name][index]) for name in _COUNTS}
    plain |= {name: str(columns[name][index]) for name in _WORDS}
    flags = int(columns["flags"][index])
    state = int(columns["state"][index])
    peer = int(columns["peer_rank"][index])
    return CollectiveRecord(
        attempt=chunk.attempt,
        rank=chunk.rank,
        **plain,
        peer_rank=peer if peer >= 0 else None,
        arrived_ms=int(columns["arrived_ns"][index]) / 1e6,
        started_ms=ms("started_ns"),
        duration_ms=ms("duration_ns"),
        device_ms=ms("device_duration_ns"),
        returned_ms=ms("returned_ns"),
        blocked_ms=ms("blocked_ns"),
        state=STATES[state] if 0 <= state < len(STATES) else STATES[0],
        is_async=bool(flags & FLAG_ASYNC),
        is_p2p=bool(flags & FLAG_P2P),
        end_is_upper_bound=bool(flags & FLAG_END_IS_UPPER_BOUND),
    )


def _groups(connection: sa.Connection, run: sa.Row[Any]) -> tuple[dict[str, int], set[str]]:
    """Return how many members each group has, and the groups whose members' devices wait."""
    table = tables.process_group.c
    rows = connection.execute(
        sa.select(table.group, table.ranks, table.backend).where(
            table.run_id == run.run_id, table.attempt == run.attempt
        )
    ).all()
    members = {row.group: len(json.loads(row.ranks)) for row in rows}
    return members, {row.group for row in rows if is_of_device(row.backend)}


def _text(rows: list[CollectiveRow], run: sa.Row[Any]) -> str:
    if not rows:
        if run.world_size == 1:
            return "One rank: no collectives."
        return "No collective was recorded in this range."
    first = rows[0]
    if first.exposed_ms_per_step is None:
        count = sum(row.count for row in rows)
        return f"{count:,} operations; how long a step waits for each on the devices is not known."
    total = sum(row.exposed_ms_per_step or 0 for row in rows)
    return (
        f"{sum(row.count for row in rows):,} operations; the main thread waits "
        f"{duration_text(total)} of a step for them, most in {first.operation} of {first.group}."
    )
