"""Puts old chunks of a run that are in objects together, as Parquet files (store/segments.py).

They are read and the file is kept outside of any transaction; a short one then puts rows of row
groups in the place of those of the chunks, if all of these are still there. Their objects go later,
as a page that began before may still read them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope.wire.chunk import BLOCK_RANKS, RANK, Column, Words
from rankscope_server.problems import Problem
from rankscope_server.retention.dropped import drop_unnamed
from rankscope_server.retention.kinds import content_bytes
from rankscope_server.retention.plan import Rules, facts_of, marked
from rankscope_server.retention.sizes import SETTLED_NS, Size, subtract
from rankscope_server.store import tables
from rankscope_server.store.blobs import Blobs, Place
from rankscope_server.store.chunks import PLACE, counting, decoded, folder_of
from rankscope_server.store.segments import (
    KINDS,
    VERSION,
    Range,
    SegmentKind,
    Source,
    Written,
    is_exact,
    sorted_columns,
    write,
)
from rankscope_server.store.unit import Unit

MOST_EVENTS = 1_000_000  # of a file: some 6 MiB, and a second or two of work
GROUP_EVENTS = 100_000  # of a row group, which one answer reads as a whole
GRACE_NS = 600 * 10**9  # a page that began before reads what it found
_IDS_AT_ONCE = 500  # SQLite bounds the number of parameters
_TABLE = tables.chunk


class MeanwhileError(Problem):
    """What was to be put together is not there any more."""

    def __init__(self, what: str) -> None:
        super().__init__(409, what, None, "the next round looks again")


@dataclass(frozen=True, slots=True)
class Segment:
    """A file that is kept, and the rows that take the place of those of its chunks."""

    run_id: str
    kind: SegmentKind
    ids: list[int]  # of the chunks
    objects: frozenset[str]  # that these named
    place: Place
    written: Written
    rows: list[dict[str, Any]]


def segments_of(
    connection: sa.Connection, rules: Rules, now_ns: int, blobs: Blobs
) -> Iterator[Segment]:
    """Yield files of all that is old: of a run that is over, and of a live one before its replay.

    Each is kept already. Raises StoreUnavailableError.
    """
    for run in facts_of(connection, rules, now_ns).values():
        age_ns = rules.replay_ns if run.is_live else SETTLED_NS
        until = _settled(connection, marked(connection, now_ns - age_ns, now_ns).ids["chunk_id"])
        for kind in KINDS:
            for rows in _parts(connection, run.run_id, kind, until, with_rest=not run.is_live):
                made = _made(connection, blobs, run.run_id, kind, rows)
                if made is not None:
                    yield made


def put_in_place(unit: Unit, made: Segment) -> None:
    """Put the rows of a file in the place of its chunks, under the lock of the run.

    Raises MeanwhileError, and nothing is changed, where one of these is not there any more.
    """
    connection, size = unit.connection, Size()
    for at in range(0, len(made.ids), _IDS_AT_ONCE):
        part = made.ids[at : at + _IDS_AT_ONCE]
        gone = connection.execute(
            sa.delete(_TABLE)
            .where(_TABLE.c.id.in_(part), _TABLE.c.row_group < 0)
            .returning(content_bytes(_TABLE))
        )
        for (num_bytes,) in gone:
            size.add(1, int(num_bytes))
    if size.rows != len(made.ids):
        raise MeanwhileError(f"chunks of {made.kind} of run {made.run_id} went meanwhile")
    connection.execute(sa.insert(_TABLE), made.rows)
    written, footer = made.written, made.written.footer
    connection.execute(
        sa.insert(tables.segment).values(
            object=made.place.object, run_id=made.run_id, kind=made.kind, version=VERSION,
            count=sum(row["count"] for row in made.rows), num_bytes=len(written.data),
            footer_start=footer.start, footer_crc32=_crc32(written, footer),
        )
    )  # fmt: skip
    ids = [row["id"] for row in made.rows]
    new = connection.scalar(
        sa.select(sa.func.sum(content_bytes(_TABLE))).where(_TABLE.c.id.in_(ids))
    )
    less = Size(size.rows - len(ids), size.bytes - int(new or 0))
    subtract(connection, made.run_id, made.kind, less)
    drop_unnamed(connection, made.objects, unit.now_ns + GRACE_NS)


def _settled(connection: sa.Connection, until: int) -> int:
    """Return up to which row chunks are old and counted: their sizes are written down."""
    table = tables.size_counted.c
    counted = sa.select(table.counted_id).where(table.source == _TABLE.name)
    return min(until, int(connection.scalar(counted) or 0))


def _parts(
    connection: sa.Connection, run_id: str, kind: str, until: int, *, with_rest: bool
) -> Iterator[list[sa.Row[Any]]]:
    """Yield rows of the chunks of one file each, without their data, in the order of their ids."""
    columns = [column for column in _TABLE.c if column is not _TABLE.c.data]
    rows = connection.execute(
        sa.select(*columns)
        .where(
            _TABLE.c.run_id == run_id, _TABLE.c.kind == kind, _TABLE.c.id <= until,
            _TABLE.c.object.is_not(None), _TABLE.c.row_group < 0,
        )
        .order_by(_TABLE.c.id)
    ).all()  # fmt: skip
    part, events = list[sa.Row[Any]](), 0
    for row in rows:
        part.append(row)
        events += row._mapping["count"]
        if events >= MOST_EVENTS:
            yield part
            part, events = [], 0
    if with_rest and len(part) > 1:
        yield part


def _made(
    connection: sa.Connection,
    blobs: Blobs,
    run_id: str,
    kind: SegmentKind,
    part: Sequence[sa.Row[Any]],
) -> Segment | None:
    """Keep the file of some chunks; None where not two of them can be in one as they are."""
    counting(connection)  # what cannot be read stays as it is
    placed = _placed(connection, [int(row.id) for row in part])
    by_id = {int(row.id): row for row in part}
    groups = _groups(
        [
            (by_id[int(row.id)], columns)
            for row, columns in decoded(connection, placed)
            if is_exact(columns)
        ]
    )
    if sum(len(rows) for rows, _ in groups) < 2:
        return None
    written = write(kind, run_id, [source for _, source in groups])
    (place,) = blobs.put([(f"{folder_of(run_id)}/{kind}/parquet", written.data)])
    ids = sorted(int(row.id) for rows, _ in groups for row in rows)
    objects = frozenset(str(row.object) for rows, _ in groups for row in rows)
    made = [
        _row(rows, source) | {"object": place.object, "row_group": at, "start": span.start,
                              "num_bytes": span.end - span.start, "crc32": _crc32(written, span)}
        for at, ((rows, source), span) in enumerate(zip(groups, written.groups, strict=True))
    ]  # fmt: skip
    return Segment(run_id, kind, ids, objects, place, written, made)


def _placed(connection: sa.Connection, ids: Sequence[int]) -> list[sa.Row[Any]]:
    found: list[Any] = []
    for at in range(0, len(ids), _IDS_AT_ONCE):
        part = ids[at : at + _IDS_AT_ONCE]
        rows = connection.execute(sa.select(_TABLE.c.id, *PLACE).where(_TABLE.c.id.in_(part)))
        found.extend(rows)
    return sorted(found, key=lambda row: int(row.id))


def _groups(
    chunks: Sequence[tuple[sa.Row[Any], Mapping[str, Column]]],
) -> list[tuple[list[sa.Row[Any]], Source]]:
    """Return chunks by row group: of ranks of one host and block, with the same columns."""
    found: dict[tuple[Any, ...], list[tuple[sa.Row[Any], dict[str, Column]]]] = {}
    windows: dict[tuple[Any, ...], tuple[int, int]] = {}  # the number of the window, its events
    for row, columns in chunks:
        count = row._mapping["count"]
        whose = dict(columns)
        whose.setdefault(RANK, np.full(count, row.rank, np.int64))
        key = (row.attempt, row.rank // BLOCK_RANKS, row.host, tuple(sorted(whose)))
        window, events = windows.get(key, (0, 0))
        if events and events + count > GROUP_EVENTS:
            window, events = window + 1, 0
        windows[key] = window, events + count
        found.setdefault((*key[:2], row.host, window, key[3]), []).append((row, whose))
    groups = [([row for row, _ in part], _source(part)) for part in found.values()]
    groups.sort(key=lambda group: (group[1].attempt, group[0][0].rank, group[0][0].step_lo))
    return groups


def _source(part: Sequence[tuple[sa.Row[Any], Mapping[str, Column]]]) -> Source:
    first, kind = part[0][0], part[0][0].kind
    joined = {name: _joined([columns[name] for _, columns in part]) for name in part[0][1]}
    return Source(first.attempt, first.host, sorted_columns(kind, joined))


def _joined(columns: Sequence[Column]) -> Column:
    if not isinstance(columns[0], Words | list):
        return np.concatenate([np.asarray(column) for column in columns])
    places: dict[str, int] = {}
    codes = []
    for column in map(Words.of, columns):
        known = [places.setdefault(word, len(places)) for word in column.words]
        codes.append(np.array(known, np.int64)[column.codes])
    return Words(np.concatenate(codes), list(places))


def _row(rows: Sequence[sa.Row[Any]], source: Source) -> dict[str, Any]:
    """Return the row of a row group; it is as old as the newest of its chunks."""
    ranks = np.asarray(source.columns[RANK])
    newest = max(rows, key=lambda row: int(row.id))
    return {
        "id": newest.id, "first_id": min(int(row.id) for row in rows),
        "run_id": newest.run_id, "kind": newest.kind, "attempt": source.attempt,
        "host": source.host, "batch_id": max(row.batch_id for row in rows), "data": b"",
        "rank": int(ranks.min()), "rank_hi": int(ranks.max()), "count": len(ranks),
        **{name: min(row._mapping[name] for row in rows) for name in ("step_lo", "time_lo_ns")},
        **{
            name: max(row._mapping[name] for row in rows)
            for name in ("step_hi", "time_hi_ns", "max_duration_ns")
        },
    }  # fmt: skip


def _crc32(written: Written, span: Range) -> int:
    return zlib.crc32(written.data[span.start : span.end])
