"""What is kept of ranks between requests: in memory, and read of the store where it is not."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable

import sqlalchemy as sa

from rankscope.wire.schema import OPEN_SPANS, SPANS
from rankscope_server.otlp.steps import Kept, of_event
from rankscope_server.store import tables

_MOST_RANKS = 65_536
_SURE_SECONDS = 60.0  # a rank that was silent for longer may have sent to another server
Key = tuple[str, int, int]  # run, attempt, rank


class Book:
    """Ranks of all runs that send spans. What is read is a copy; `put` it once it is stored."""

    def __init__(self, read: Callable[[Key], Kept]) -> None:
        self._read = read
        self._kept: OrderedDict[Key, tuple[Kept, float]] = OrderedDict()  # with when it was put
        self._ranks: OrderedDict[tuple[str, str], int] = OrderedDict()

    def get(self, key: Key) -> Kept:
        """Return a copy of what is kept of a rank."""
        kept, put_s = self._kept.get(key, (None, 0.0))
        if kept is None or time.monotonic() - put_s > _SURE_SECONDS:
            kept = self._read(key)
        return kept.copy()

    def put(self, key: Key, kept: Kept) -> None:
        """Keep what is stored now."""
        self._kept[key] = kept, time.monotonic()
        self._kept.move_to_end(key)
        if len(self._kept) > _MOST_RANKS:
            self._kept.popitem(last=False)

    def rank_of(self, run_id: str, instance: str) -> int:
        """Return the rank that a process named in another of its spans, -1 where it did not."""
        return self._ranks.get((run_id, instance), -1)

    def is_rank(self, run_id: str, instance: str, rank: int) -> None:
        """Note the rank of a process."""
        if instance:
            self._ranks[run_id, instance] = rank
            if len(self._ranks) > _MOST_RANKS:
                self._ranks.popitem(last=False)


def read_kept(connection: sa.Connection, key: Key) -> Kept:
    """Return what the store has of a rank."""
    run_id, attempt, rank = key
    ranks, events = tables.rank.c, tables.event.c
    row = connection.execute(
        sa.select(ranks.sources, ranks.registered_ns).where(
            ranks.run_id == run_id, ranks.attempt == attempt, ranks.rank == rank
        )
    ).first()
    if row is None:
        return Kept()
    if row.registered_ns is not None and json.loads(row.sources).get("steps") != SPANS:
        return Kept(is_foreign=True)
    found = connection.scalar(
        sa.select(events.fields)
        .where(
            events.run_id == run_id, events.attempt == attempt, events.rank == rank,
            events.name == OPEN_SPANS,
        )
        .order_by(events.id.desc())
        .limit(1)
    )  # fmt: skip
    return Kept() if found is None else of_event(found)
