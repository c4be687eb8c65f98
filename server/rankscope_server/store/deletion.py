"""Runs that were deleted: their ids stay known, so that what comes late is refused, not revived.

The row here is written in the first transaction of a deletion, together with the end of the row
of the run: from then on no batch of it is taken, and no page shows it. The rows of its data go
afterwards, in many short transactions.
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from rankscope.wire.schema import IMPORTED
from rankscope_server.problems import Problem, no_run, not_found
from rankscope_server.store import tables
from rankscope_server.store.unit import Unit

OVER = ("ended", "failed")
# Built once: it is asked with every batch.
_SELECT_DELETION = sa.select(tables.deletion.c.asked_ns).where(
    tables.deletion.c.run_id == sa.bindparam("run_id")
)


@dataclass(frozen=True, slots=True)
class Deleted:
    """A run whose batches are refused."""

    run_id: str
    asked_ns: int


def find_deletion(connection: sa.Connection, run_id: str) -> Deleted | None:
    """Return the deletion of a run, None where it was never deleted.

    To who holds the lock of the run (`locks.of_run`): none can begin meanwhile.
    """
    asked_ns = connection.scalar(_SELECT_DELETION, {"run_id": run_id})
    return None if asked_ns is None else Deleted(run_id, int(asked_ns))


def deletion_in(unit: Unit, run_id: str) -> Deleted | None:
    """Return the same, read once in a transaction, however many batches of a run are in it."""
    return unit.once(("deletion", run_id), lambda: find_deletion(unit.connection, run_id))


def gone(deleted: Deleted) -> Problem:
    """Return the answer to what is about a deleted run."""
    return Problem(
        410, f"run {deleted.run_id[:128]!r} was deleted", "run_id",
        "start a run with another id, or free this one: rankscope runs release",
    )  # fmt: skip


def absent(connection: sa.Connection, run_id: str) -> Problem:
    """Return the problem of a run that is not there: 410 where it was deleted, else 404."""
    deleted = None if "\x00" in run_id else find_deletion(connection, run_id)
    if deleted is not None:
        return gone(deleted)
    return no_run(run_id)


def begin(
    unit: Unit, run_id: str, reason: str, live_after_ns: int, rows: int, num_bytes: int
) -> None:
    """Mark a run as deleted; its data goes afterwards. `rows` and bytes are what there is to go.

    Under the lock of the run (`locks.of_run`). Raises Problem 404 where there is none, 409 where it
    is pinned or live.
    """
    unit.flush()  # what batches in this transaction change about the run is of before
    connection = unit.connection
    run = connection.execute(sa.select(tables.run).where(tables.run.c.run_id == run_id)).first()
    if run is None:
        deleted = find_deletion(connection, run_id)
        raise gone(deleted) if deleted else no_run(run_id)
    if is_pinned(connection, run_id):
        raise Problem(
            409,
            f"run {run_id!r} is pinned",
            "run",
            f"unpin it first: rankscope runs unpin {run_id}",
        )
    if is_live(run.status, run.launcher, run.received_ns, live_after_ns):
        raise Problem(
            409, f"run {run_id!r} is live", "run",
            "end it first; without news for an hour (--forget-after-seconds) it counts as over",
        )  # fmt: skip
    connection.execute(
        sa.insert(tables.deletion).values(
            run_id=run_id, name=run.name or run_id, reason=reason, asked_ns=unit.now_ns,
            rows=1, bytes=0, rows_at_start=rows + 1, bytes_at_start=num_bytes,
        )
    )  # fmt: skip
    connection.execute(sa.delete(tables.run).where(tables.run.c.run_id == run_id))
    unit.read_again()


def release(unit: Unit, run_id: str) -> None:
    """Forget that a run was deleted: its id may be used again.

    Raises Problem 404 where it was not, 409 while its data is still being removed.
    """
    table = tables.deletion
    row = unit.connection.execute(sa.select(table).where(table.c.run_id == run_id)).first()
    if row is None:
        raise not_found(f"no run {run_id[:128]!r} was deleted", "see /api/v1/deletions", "run")
    if row.finished_ns is None:
        raise Problem(409, f"run {run_id!r} is still being removed", "run", "wait until it is gone")
    unit.connection.execute(sa.delete(table).where(table.c.run_id == run_id))
    unit.read_again()


def set_pin(unit: Unit, run_id: str, is_wanted: bool) -> None:
    """Pin a run, or unpin it. Raises Problem 404, 410 where there is none."""
    connection, run, table = unit.connection, tables.run.c, tables.pin
    if connection.scalar(sa.select(run.run_id).where(run.run_id == run_id)) is None:
        deleted = find_deletion(connection, run_id)
        raise gone(deleted) if deleted else no_run(run_id)
    if not is_wanted:
        connection.execute(sa.delete(table).where(table.c.run_id == run_id))
    elif not is_pinned(connection, run_id):
        connection.execute(sa.insert(table).values(run_id=run_id, pinned_ns=unit.now_ns))


def is_pinned(connection: sa.Connection, run_id: str) -> bool:
    """Return whether a run is pinned."""
    table = tables.pin.c
    return connection.scalar(sa.select(table.run_id).where(table.run_id == run_id)) is not None


def is_live(status: str, launcher: str, received_ns: int, live_after_ns: int) -> bool:
    """Return whether a run may still send: it has not ended, and was heard of lately."""
    return status not in OVER and launcher != IMPORTED and received_ns >= live_after_ns
