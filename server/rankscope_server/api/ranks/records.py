"""Raw collectives, newest first, and how many there are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope.wire.chunk import RANK
from rankscope.wire.schema import (
    COLLECTIVE_COLUMNS,
    FLAG_ASYNC,
    FLAG_END_IS_UPPER_BOUND,
    FLAG_P2P,
    STATES,
)
from rankscope_server.answers import LeftOut, capped
from rankscope_server.api.ranks.chunks import MAX_CHUNKS, Part, Wanted, read
from rankscope_server.api.ranks.schema import CollectiveRecord, CollectiveRecords
from rankscope_server.api.ranks.thinned import thinned_of
from rankscope_server.store import tables

MAX_RECORDS = 5_000
_BATCH = 64  # chunks that are opened before it is asked whether older ones can matter
_COUNTS = ("step", "sequence", "size_bytes", "num_tensors")
_WORDS = ("group", "operation", "dtype", "ended_by", "call_site")
_SHOWN = frozenset(COLLECTIVE_COLUMNS)
_PLACE = frozenset(("arrived_ns", "step"))
_STEP = frozenset(("step",))
Array = np.ndarray[Any, np.dtype[Any]]


def records(
    connection: sa.Connection, run: sa.Row[Any], wanted: Wanted, limit: int
) -> CollectiveRecords:
    """Return the newest raw records, newest first; of how many."""
    rows = newest(connection, wanted, min(max(limit, 1), MAX_RECORDS))
    total, is_exact = _total(connection, wanted)
    unknown = "the total counts whole parts of which some records are outside the steps asked for"
    left_out = [] if is_exact else [LeftOut(what=unknown, count=None)]
    if wanted.hi is not None:
        asked = replace(wanted, hi=min(wanted.hi, run.step))
        left_out += thinned_of(connection, asked, run.world_size).left_out
    return CollectiveRecords(rows=rows, capped=capped(len(rows), total), left_out=left_out)


def newest(connection: sa.Connection, wanted: Wanted, limit: int) -> list[CollectiveRecord]:
    """Return the newest raw records, newest first.

    No record of a chunk is newer than its end: chunks are opened by their ends, the latest first,
    until those that are left ended before the oldest record that is returned.
    """
    table = tables.chunk.c
    statement = (
        sa.select(table.id, table.time_hi_ns)
        .where(*wanted.where())
        # of one rank its index is quicker than that of the times of all ranks
        .order_by((table.time_hi_ns if wanted.rank is None else table.time_hi_ns + 0).desc())
    )
    options = {"stream_results": True, "max_row_buffer": _BATCH}
    found = np.zeros((0, 3), np.int64)  # arrived, chunk, row: the newest ones
    with connection.execute(statement, execution_options=options) as ends:
        while batch := ends.fetchmany(_BATCH):
            if len(found) == limit and batch[0].time_hi_ns < found[-1, 0]:
                break
            parts = [found]
            for part in read(connection, [int(end.id) for end in batch], _PLACE):
                places = np.flatnonzero(wanted.holds(part.numbers))
                arrived = part.numbers["arrived_ns"][places]
                parts.append(np.column_stack([arrived, np.full(len(places), part.id), places]))
            joined = np.concatenate(parts)
            found = joined[np.lexsort(-joined.T[::-1])][:limit]
    return _rows(connection, found)


def _rows(connection: sa.Connection, found: Array) -> list[CollectiveRecord]:
    numbers = np.unique(found[:, 1]).tolist()
    chunks = {part.id: part for part in read(connection, numbers, _SHOWN)}
    return [_record(chunks[number], place) for _, number, place in found.tolist()]


def _total(connection: sa.Connection, wanted: Wanted) -> tuple[int, bool]:
    """Return how many records there are, and whether that is exact."""
    table = tables.chunk.c
    if wanted.rank is None and wanted.lo is None and wanted.hi is None:
        rollup = tables.op_rollup.c  # far fewer rows
        where = [rollup.run_id == wanted.run_id]
        if wanted.attempt is not None:
            where.append(rollup.attempt == wanted.attempt)
        counted = connection.scalar(sa.select(sa.func.sum(rollup["count"])).where(*where))
        return int(counted or 0), True
    where = wanted.where()
    crossing: list[sa.ColumnElement[bool]] = []
    if wanted.lo is not None:
        crossing.append(table.step_lo < wanted.lo)
    if wanted.hi is not None:
        crossing.append(table.step_hi > wanted.hi)
    if wanted.rank is not None:
        crossing.append(table.rank != table.rank_hi)
    all_of_them = sa.select(sa.func.sum(table["count"])).where(*where)
    total = int(connection.scalar(all_of_them) or 0)
    if not crossing:
        return total, True
    edges = connection.scalars(
        sa.select(table.id).where(*where, sa.or_(*crossing)).limit(MAX_CHUNKS + 1)
    ).all()
    for part in read(connection, edges[:MAX_CHUNKS], _STEP):
        total -= int((~wanted.holds(part.numbers)).sum())
    return total, len(edges) <= MAX_CHUNKS


def _record(chunk: Part, index: int) -> CollectiveRecord:
    columns = chunk.numbers

    def ms(name: str) -> float | None:
        value = int(columns[name][index])
        return None if value < 0 else value / 1e6

    plain: dict[str, Any] = {name: int(columns[name][index]) for name in _COUNTS}
    for name in _WORDS:
        column = chunk.words[name]
        plain[name] = column.words[int(column.codes[index])]
    flags = int(columns["flags"][index])
    state = int(columns["state"][index])
    peer = int(columns["peer_rank"][index])
    return CollectiveRecord(
        attempt=chunk.attempt,
        rank=int(columns[RANK][index]),
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
