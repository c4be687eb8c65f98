"""How far the batches of a producer are stored, for its collector, which holds them until then."""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa

from rankscope.wire.schema import Watermark
from rankscope_server.store import tables

_PRODUCER, _BATCH = tables.producer.c, tables.batch.c
_SELECT_PRODUCER = sa.select(
    _PRODUCER.id, _PRODUCER.first_sequence, _PRODUCER.last_sequence, _PRODUCER.received,
    _PRODUCER.refused,
).where(
    _PRODUCER.run_id == sa.bindparam("run_id"), _PRODUCER.producer == sa.bindparam("producer")
)  # fmt: skip
_MOST_ROWS = 10_000  # of which a watermark can move on with one question
_SELECT_STORED = (
    sa.select(_BATCH.sequence)
    .where(_BATCH.producer_id == sa.bindparam("id"), _BATCH.sequence >= sa.bindparam("first"))
    .order_by(_BATCH.sequence)
    .limit(_MOST_ROWS)
)


def watermark_of(
    connection: sa.Connection, run_id: str, producer: str, held_from: int
) -> Watermark:
    """Return how far a producer's batches are stored, from the oldest that its collector holds."""
    asked = {"run_id": run_id, "producer": producer}
    row = connection.execute(_SELECT_PRODUCER, asked).first()
    if row is None:
        return Watermark(durable=0, newest=0)
    if row.received == row.last_sequence - row.first_sequence + 1:  # none is missing between
        durable = row.last_sequence if row.first_sequence <= held_from else 0
    else:
        stored = connection.scalars(_SELECT_STORED, {"id": row.id, "first": held_from})
        durable = _end_of_unbroken(held_from, stored)
    return Watermark(durable=durable, newest=row.last_sequence, refused=row.refused)


def _end_of_unbroken(first: int, ascending: Iterable[int]) -> int:
    """Return up to where numbers follow each other from `first` on; the one before it for none."""
    end = first - 1
    for number in ascending:
        if number != end + 1:
            break
        end = number
    return end
