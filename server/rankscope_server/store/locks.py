"""Locks of a transaction: of what several processes may read, change and write at a time.

All writing of a run takes its lock. So what is read stays as it is until it is written, a batch
that is sent to two servers at once is stored once, and within a run the order of ids is that of
commits: a reader that has seen a batch has seen all with a smaller id.
"""

from __future__ import annotations

from collections.abc import Set

import sqlalchemy as sa

_TAKE = sa.text(
    "SELECT pg_advisory_xact_lock(hashtextextended(name, 0))"
    " FROM unnest(CAST(:names AS text[])) AS name"
)
ALERTS = "alerts"  # rules, channels, what is open and what is sent


def of_run(run_id: str) -> str:
    """Return the name of the lock of a run."""
    return f"run {run_id}"


def take_locks(connection: sa.Connection, names: Set[str]) -> None:
    """Wait for some locks, which hold until the transaction ends; always in the same order.

    SQLite has one process and one writer: there nothing is to be locked.
    """
    if names and connection.dialect.name == "postgresql":
        connection.execute(_TAKE, {"names": sorted(names)})
