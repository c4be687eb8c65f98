"""Data of an older version that today's code stores anew, once all migrations are done.

A migration is never changed, the code that writes log lines is. So migration 0002 leaves the
blocks of the first version beside, and their lines are added here as if they came now. All is in
the transaction of the migrations: a server that is killed in between finds the tables as before.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import groupby
from typing import Any, TypeAlias

import msgspec
import numpy as np
import sqlalchemy as sa

from rankscope_server.store.lines import Line, LineWriter
from rankscope_server.store.packing import unpack

log = logging.getLogger(__name__)
_FIRST_BLOCKS = sa.table(
    "first_log_block",
    *(sa.column(name) for name in ("id", "run_id", "head")),
    sa.column("body", sa.LargeBinary),
)
_AT_ONCE = 16  # blocks of at most 512 lines and about 1 MiB
_TYPES = ("<i8", "<i4", "<i4", "<i4", "<i8", "<u2", "<u2", "<u2")
# time, level, attempt, rank, step; places of host, logger, stream in the lists of words
_Head: TypeAlias = tuple[
    bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes, list[str], list[str], list[str]
]
_decode_head = msgspec.msgpack.Decoder(_Head).decode
_decode_body = msgspec.msgpack.Decoder(list[tuple[str, dict[str, str]]]).decode


def carry_over(connection: sa.Connection) -> None:
    """Store what migrations left beside, and remove it. Their lines get new ids."""
    if not sa.inspect(connection).has_table(_FIRST_BLOCKS.name):
        return
    num_blocks = connection.scalar(sa.select(sa.func.count()).select_from(_FIRST_BLOCKS))
    if num_blocks:
        log.warning("%s blocks of log lines are stored in their new form", num_blocks)
    for block_ids in _in_parts(connection):
        writer = LineWriter(connection)
        table = _FIRST_BLOCKS.c
        rows = connection.execute(
            sa.select(_FIRST_BLOCKS).where(table.id.in_(block_ids)).order_by(table.id)
        )
        for row in rows:
            lines = _lines(row)
            for host, of_host in groupby(
                sorted(lines, key=lambda line: line.host), key=lambda line: line.host
            ):
                writer.add(row.run_id, host, list(of_host))
        writer.flush()
    connection.execute(sa.text(f"DROP TABLE {_FIRST_BLOCKS.name}"))


def _in_parts(connection: sa.Connection) -> Iterator[list[int]]:
    """Yield the numbers of some blocks of one run at a time, in the order in which they came."""
    table = _FIRST_BLOCKS.c
    ids = connection.scalars(sa.select(table.id).order_by(table.run_id, table.id)).all()
    for at in range(0, len(ids), _AT_ONCE):
        yield list(ids[at : at + _AT_ONCE])


def _lines(row: sa.Row[Any]) -> list[Line]:
    """Return the lines of a block of the first version."""
    *columns, hosts, loggers, streams = _decode_head(unpack(row.head))
    numbers = [
        np.frombuffer(column, dtype).tolist() for column, dtype in zip(columns, _TYPES, strict=True)
    ]
    texts = _decode_body(unpack(row.body))
    return [
        Line._make([*values, hosts[host], loggers[logger], streams[stream], message, fields])
        for *values, host, logger, stream, (message, fields) in zip(*numbers, texts, strict=True)
    ]
