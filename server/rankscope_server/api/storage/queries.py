"""What is stored, what would go, what is gone."""

from __future__ import annotations

import time

import sqlalchemy as sa

from rankscope_server.answers import capped, of_row
from rankscope_server.api.service import Service
from rankscope_server.api.storage.schema import (
    DeletionRow,
    DiskAnswer,
    KindSize,
    PlannedRow,
    RetentionAnswer,
    RetentionProgress,
    RunSize,
    StorageAnswer,
)
from rankscope_server.problems import not_found
from rankscope_server.retention.kinds import KINDS, LABELS, RAW_KINDS, Kind
from rankscope_server.retention.plan import Limit, RunFacts, facts_of, unmet
from rankscope_server.retention.sizes import Size, Sizes
from rankscope_server.store import tables
from rankscope_server.text import plural, size_text

MAX_ROWS = 1_000


def storage(service: Service) -> StorageAnswer:
    """Return the sizes of everything."""
    retention = service.retention
    sizes = retention.counted().sizes
    with service.read() as connection:
        facts = facts_of(connection, retention.rules, time.time_ns())
    kinds = _kinds(service, sizes)
    runs = sorted(
        (_run(run, sizes.get(run.run_id, {})) for run in facts.values()),
        key=lambda run: (-run.bytes, run.run_id),
    )
    disk = _disk(service)
    num_bytes = sum(kind.bytes for kind in kinds)
    text = f"{plural(len(runs), 'run')}, {size_text(num_bytes)}"
    if disk.free_bytes is not None:
        text += f"; {size_text(disk.free_bytes)} are free on the disk"
    return StorageAnswer(
        text=disk.full or f"{text}.", disk=disk, rows=sum(kind.rows for kind in kinds),
        bytes=num_bytes, kinds=kinds, runs=runs[:MAX_ROWS], capped=capped(MAX_ROWS, len(runs)),
    )  # fmt: skip


def retention(service: Service) -> RetentionAnswer:
    """Return what a round would remove now; nothing is removed."""
    loop = service.retention
    counted = loop.counted()
    planned = loop.planned(counted) if loop.rules.are_any else []
    rows = [of_row(PlannedRow, one) for one in planned]
    num_bytes = sum(row.bytes for row in rows)
    if not loop.rules.are_any:
        text = "No setting says that anything is removed by itself."
    elif not rows:
        text = "Nothing would be removed now."
    else:
        text = f"{size_text(num_bytes)} would be removed now."
    with service.read() as connection:
        progress = loop.progress_of_owner(connection)
        table = tables.deletion
        newest = sa.select(table).order_by(table.c.asked_ns.desc()).limit(MAX_ROWS)
        deletions = [of_row(DeletionRow, row) for row in connection.execute(newest)]
    return RetentionAnswer(
        text=text, are_any=loop.rules.are_any, rows=sum(row.rows for row in rows),
        bytes=num_bytes, planned=rows[:MAX_ROWS],
        unmet=unmet(loop.rules, counted.sizes, planned),
        progress=of_row(RetentionProgress, progress), deletions=deletions,
        capped=capped(MAX_ROWS, len(rows)),
    )  # fmt: skip


def deletion(connection: sa.Connection, run_id: str) -> DeletionRow:
    """Return how far a deletion is. Raises Problem 404."""
    table = tables.deletion
    row = connection.execute(sa.select(table).where(table.c.run_id == run_id)).first()
    if row is None:
        raise not_found(f"no run {run_id[:128]!r} was deleted", "see /api/v1/retention", "run")
    return of_row(DeletionRow, row)


def _kinds(service: Service, sizes: Sizes) -> list[KindSize]:
    found = {kind: Size() for kind in KINDS}
    for kinds in sizes.values():
        for kind, size in kinds.items():
            found[kind].add(size.rows, size.bytes)
    rules = service.retention.rules
    limits: dict[Kind, Limit] = {
        "rest": Limit(0.0, 0),
        **{kind: rules.raw[kind] for kind in RAW_KINDS},
    }
    return [
        KindSize(
            kind=kind, label=LABELS[kind], rows=size.rows, bytes=size.bytes,
            keep_days=limits[kind].days, keep_bytes=limits[kind].bytes,
        )
        for kind, size in found.items()
    ]  # fmt: skip


def _run(run: RunFacts, kinds: dict[Kind, Size]) -> RunSize:
    return RunSize(
        run_id=run.run_id, name=run.name, status=run.status, is_live=run.is_live,
        is_pinned=run.is_pinned, received_ms=run.received_ns / 1e6 or None,
        rows=sum(size.rows for size in kinds.values()),
        bytes=sum(size.bytes for size in kinds.values()),
        kinds={kind: size.bytes for kind, size in kinds.items()},
    )  # fmt: skip


def _disk(service: Service) -> DiskAnswer:
    space = service.retention.space
    return of_row(
        DiskAnswer, service.disk.space(), database_bytes=space.database_bytes(),
        reusable_bytes=space.free_bytes(), full=service.disk.full(),
    )  # fmt: skip
