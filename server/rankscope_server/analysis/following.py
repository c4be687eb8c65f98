"""What other server processes stored of a run that this one looks at, read as it comes."""

from __future__ import annotations

from collections.abc import Set

import sqlalchemy as sa

from rankscope_server.analysis.notable_lines import notable_lines
from rankscope_server.store import tables
from rankscope_server.store.restart import Replayed, replay_batches, replay_states


def read_others(
    connection: sa.Connection,
    run_id: str,
    state: Replayed,
    last_batch: int,
    ours: Set[int],
    last_block: int,
) -> tuple[int, frozenset[int], int]:
    """Apply the batches after `last_batch` that are not `ours`, and the lines after `last_block`.

    Returns the newest batch, the ids of those that were applied, and the newest block of lines.
    All batches up to the newest are there: within a run ids are in the order of commits.
    """
    table = tables.batch.c
    stored = connection.scalars(
        sa.select(table.id).where(table.run_id == run_id, table.id > last_batch)
    ).all()
    newest = max(stored, default=last_batch)
    others = frozenset(stored) - ours
    if not others:
        return newest, others, last_block
    replay_batches(connection, run_id, state, others)
    replay_states(connection, run_id, state)
    newest_line = newest_block(connection, run_id)
    for line in notable_lines(connection, run_id, after_block=last_block):
        state.apply_record(line)
    return newest, others, newest_line


def newest_block(connection: sa.Connection, run_id: str) -> int:
    """Return the id of the newest block of log lines of a run; 0 for none."""
    table = tables.log_block.c
    newest = connection.scalar(sa.select(sa.func.max(table.id)).where(table.run_id == run_id))
    return int(newest or 0)
