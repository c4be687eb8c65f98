"""Stored log lines that may report a fault: for an analysis that begins anew, and what is usual.

Only the newest blocks that hold a warning are read, so that a long log costs a second, not minutes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import sqlalchemy as sa

from rankscope.wire.schema import LogLine
from rankscope_server.observe.baseline import RunSummary
from rankscope_server.observe.line_table import key_of
from rankscope_server.store import tables
from rankscope_server.store.lines import ID_BITS, read_body, read_head, read_words

_WARNING = 30
_MAX_BLOCKS = 128  # of 1,024 lines at most
_MAX_USUAL_BLOCKS = 32
# what a program said; events and ends of ranks are stored beside it
_OUTPUT: dict[str, Literal["logging", "stdout", "stderr"]] = {
    "logging": "logging", "stdout": "stdout", "stderr": "stderr",
}  # fmt: skip
_OF_SERVER = frozenset({"finding", "event", "error"})  # the analysis has their records
_LAST_BLOCKS = 16  # a program may say in a plain line why it leaves; they may be small
_MAX_USUAL_RUNS = 3


def notable_lines(
    connection: sa.Connection,
    run_id: str,
    max_blocks: int = _MAX_BLOCKS,
    after_block: int | None = None,
) -> Iterator[LogLine]:
    """Yield the lines in the newest blocks that hold a warning, and those said last.

    With `after_block` all lines that came after that block was the newest one.
    """
    table, data = tables.log_block.c, tables.log_lines.c
    blocks = (
        sa.select(data.block_id, data.head, data.body)
        .join_from(tables.log_block, tables.log_lines, table.id == data.block_id)
        .where(table.run_id == run_id, table.id > (after_block or 0))
        .order_by(table.time_hi_ns.desc())
    )
    most_plain = _LAST_BLOCKS if after_block is None else max_blocks
    warned = connection.execute(blocks.where(table.level_hi >= _WARNING).limit(max_blocks))
    newest = connection.execute(blocks.where(table.level_hi < _WARNING).limit(most_plain))
    for row in itertools.chain(warned, newest):
        head, body = read_head(row.head, row.block_id), read_body(row.body)
        streams = read_words(connection, np.unique(head.stream).tolist())
        # a block that others were joined into holds their lines too, by the ids they came with
        for index in np.flatnonzero(head.ids >> ID_BITS > (after_block or 0)).tolist():
            stream = streams[int(head.stream[index])]
            said_by = _OUTPUT.get(stream)
            if said_by is None and (head.level[index] < _WARNING or stream in _OF_SERVER):
                continue
            yield LogLine(
                attempt=int(head.attempt[index]),
                rank=int(head.rank[index]),
                time_ns=int(head.time_ns[index]),
                level=int(head.level[index]),
                message=body.line(index)[0],
                step=int(head.step[index]),
                stream=said_by or "agent",
            )


def usual_lines(connection: sa.Connection, earlier: Sequence[RunSummary]) -> frozenset[str]:
    """Return what the newest of some earlier runs said although they ended well."""
    table = tables.run.c
    ended = connection.scalars(
        sa.select(table.run_id)
        .where(table.run_id.in_([run.run_id for run in earlier]), table.status == "ended")
        .order_by(table.started_ns.desc())
        .limit(_MAX_USUAL_RUNS)
    ).all()
    keys = (
        key_of(line.level, line.message)
        for run_id in ended
        for line in notable_lines(connection, run_id, _MAX_USUAL_BLOCKS)
    )
    return frozenset(key for key in keys if key is not None)
