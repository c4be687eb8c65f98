"""How much is stored, by kind and run. Large tables are counted once, row after row as they grow.

Ids of rows grow with time, but on a database with several writers a smaller one may be committed
later: what is counted for good ends at a mark of a minute ago, the rest is counted each time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import sqlalchemy as sa

from rankscope.wire.sample_columns import SAMPLE_KINDS
from rankscope_server.retention.kinds import RAW_PARTS, Kind, Part, rest_tables
from rankscope_server.store import tables
from rankscope_server.store.engine import upsert
from rankscope_server.store.unit import Unit

SETTLED_NS = 60 * 10**9
RECOUNT_PAUSE_NS = 3600 * 10**9  # of these of a live run, which are read as a whole
_PAUSED = frozenset({"numbers", "rest"})
# Too large to be read as a whole: counted once by id.
_GROWING: dict[str, sa.Table] = {"chunk": tables.chunk, "batch": tables.batch}
_CHUNK_KINDS: dict[str, Kind] = {
    "collectives": "collectives", "steps": "steps", **dict.fromkeys(SAMPLE_KINDS, "samples")
}  # fmt: skip


@dataclass(slots=True)
class Size:
    """Rows and their bytes of content."""

    rows: int = 0
    bytes: int = 0

    def add(self, rows: int, num_bytes: int) -> None:
        """Add."""
        self.rows += rows
        self.bytes += num_bytes


Sizes = dict[str, dict[Kind, Size]]  # run: kind: size


@dataclass(slots=True)
class Counted:
    """What was read, and what of it is to be written down so that it is not read again."""

    sizes: Sizes = field(default_factory=lambda: defaultdict(dict))
    rows: list[dict[str, object]] = field(default_factory=list)
    reached: dict[str, int] = field(default_factory=dict)


def count(connection: sa.Connection, now_ns: int) -> Counted:
    """Return what is stored of every run. A scan of what is new, and of runs that changed."""
    counted = Counted()
    settled: Sizes = defaultdict(dict)
    known = _known(connection)
    for source, table in _GROWING.items():
        until = _settled_id(connection, source, now_ns)
        last = _counted_id(connection, source)
        for run_id, kind, size in _new(connection, table, last, until):
            settled[run_id].setdefault(kind, Size()).add(size.rows, size.bytes)
        for run_id, kind, size in _new(connection, table, max(until, last), None):
            _add(counted.sizes, run_id, kind, size)
        counted.reached[source] = max(until, last)
    for (run_id, name), (size, _, _) in known.items():
        if name in _STORED_AS:
            settled[run_id].setdefault(_STORED_AS[name], Size()).add(size.rows, size.bytes)
    for run_id, kinds in settled.items():
        for kind, size in kinds.items():
            _add(counted.sizes, run_id, kind, size)
            name = _JOURNAL if kind == "rest" else kind
            counted.rows.append(_row(run_id, name, size, 0, now_ns))
    _count_others(connection, counted, known, now_ns)
    return counted


def save(unit: Unit, counted: Counted) -> None:
    """Write down what `count` has read; of runs that were deleted meanwhile nothing."""
    run = tables.run.c
    there = set(unit.connection.scalars(sa.select(run.run_id)))
    rows = [row for row in counted.rows if row["run_id"] in there]
    upsert(
        unit.connection, tables.stored_size, rows, ("rows", "bytes", "run_version", "counted_ns")
    )
    reached = [{"source": name, "counted_id": id} for name, id in counted.reached.items()]
    upsert(unit.connection, tables.size_counted, reached, ("counted_id",))


def subtract(connection: sa.Connection, run_id: str, kind: Kind, size: Size) -> None:
    """Take removed rows off what is written down, in the transaction that removes them."""
    table = tables.stored_size
    connection.execute(
        sa.update(table)
        .where(table.c.run_id == run_id, table.c.kind == kind)
        .values(rows=table.c.rows - size.rows, bytes=table.c.bytes - size.bytes)
    )


_JOURNAL = "journal"  # what `batch` holds; shown with the rest
_STORED_AS: dict[str, Kind] = {
    "collectives": "collectives", "steps": "steps", "samples": "samples", _JOURNAL: "rest"
}  # fmt: skip


def _known(connection: sa.Connection) -> dict[tuple[str, str], tuple[Size, int, int]]:
    table = tables.stored_size
    return {
        (row.run_id, row.kind): (Size(row.rows, row.bytes), row.run_version, row.counted_ns)
        for row in connection.execute(sa.select(table))
    }


def _settled_id(connection: sa.Connection, source: str, now_ns: int) -> int:
    table = tables.received_mark
    column = table.c[f"{source}_id"]
    newest = sa.select(sa.func.max(column)).where(table.c.time_ns <= now_ns - SETTLED_NS)
    return int(connection.scalar(newest) or 0)


def _counted_id(connection: sa.Connection, source: str) -> int:
    table = tables.size_counted.c
    counted = sa.select(table.counted_id).where(table.source == source)
    return int(connection.scalar(counted) or 0)


def _new(
    connection: sa.Connection, table: sa.Table, after: int, until: int | None
) -> Iterator[tuple[str, Kind, Size]]:
    part = Part(table)
    where = [table.c.id > after]
    if until is not None:
        if until <= after:
            return
        where.append(table.c.id <= until)
    kind = table.c.kind if "kind" in table.c else sa.literal(_JOURNAL)
    rows = connection.execute(
        sa.select(table.c.run_id, kind, sa.func.count(), sa.func.sum(part.num_bytes()))
        .where(*where)
        .group_by(table.c.run_id, kind)
    )
    for run_id, name, number, num_bytes in rows:
        yield run_id, _CHUNK_KINDS.get(name, "rest"), Size(number, int(num_bytes or 0))


def _count_others(
    connection: sa.Connection,
    counted: Counted,
    known: Mapping[tuple[str, str], tuple[Size, int, int]],
    now_ns: int,
) -> None:
    """Count logs, events and the rest of the runs that changed since they were counted."""
    run = tables.run.c
    others: tuple[Kind, ...] = ("logs", "events", "numbers", "rest")
    is_over = run.status.in_(("ended", "failed"))
    for run_id, version, over in connection.execute(sa.select(run.run_id, run.version, is_over)):
        for kind in others:
            size, version_before, counted_ns = known.get((run_id, kind), (Size(), -1, 0))
            is_due = over or kind not in _PAUSED or now_ns - counted_ns > RECOUNT_PAUSE_NS
            if version != version_before and is_due:
                size = _read(connection, run_id, kind)
                counted.rows.append(_row(run_id, kind, size, version, now_ns))
            _add(counted.sizes, run_id, kind, size)


def _read(connection: sa.Connection, run_id: str, kind: Kind) -> Size:
    if kind == "rest":
        parts = tuple(Part(table) for table in rest_tables() if table not in _GROWING.values())
    else:
        parts = RAW_PARTS[kind]
    size = Size()
    for part in parts:
        number, num_bytes = connection.execute(
            sa.select(sa.func.count(), sa.func.sum(part.num_bytes())).where(part.of_run(run_id))
        ).one()
        size.add(number, int(num_bytes or 0))
    return size


def _add(sizes: Sizes, run_id: str, kind: Kind, size: Size) -> None:
    sizes.setdefault(run_id, {}).setdefault(kind, Size()).add(size.rows, size.bytes)


def _row(run_id: str, kind: str, size: Size, version: int, now_ns: int) -> dict[str, object]:
    return {
        "run_id": run_id, "kind": kind, "rows": size.rows, "bytes": size.bytes,
        "run_version": version, "counted_ns": now_ns,
    }  # fmt: skip
