"""Chunks of collectives: which ones hold a range of steps, and their columns side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope.wire.chunk import BLOCK_RANKS, RANK, Words
from rankscope_server.store import tables
from rankscope_server.store.chunks import PLACE, READ_CHUNKS, decoded

Array = np.ndarray[Any, np.dtype[Any]]
KIND = "collectives"
MAX_EVENTS = 2_000_000  # that one answer counts: half a second
MAX_CHUNKS = 4_096  # that one answer decodes: a step of so many ranks
MAX_STEP = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Wanted:
    """Collectives that are asked for; None: of any. Steps `lo` to `hi`, both included."""

    run_id: str
    attempt: int | None = None
    rank: int | None = None
    lo: int | None = None
    hi: int | None = None

    def where(self) -> list[sa.ColumnElement[bool]]:
        """Return the conditions of chunks that may hold some of them."""
        table = tables.chunk.c
        found = [table.run_id == self.run_id, table.kind == KIND]
        if self.attempt is not None:
            found.append(table.attempt == self.attempt)
        if self.rank is not None:  # which may be in a chunk that begins with another of its block
            firsts = range(self.rank // BLOCK_RANKS * BLOCK_RANKS, self.rank + 1)
            found += [table.rank.in_(firsts), table.rank_hi >= self.rank]
        if self.lo is not None:
            found.append(table.step_hi >= self.lo)
        if self.hi is not None:
            found.append(table.step_lo <= self.hi)
        return found

    def holds(self, numbers: Mapping[str, Array]) -> Array:
        """Return which events, of which the step and the rank are known, are asked for."""
        steps = numbers["step"]
        inside: Array = (steps >= (self.lo or 0)) & (
            steps <= (MAX_STEP if self.hi is None else self.hi)
        )
        return inside if self.rank is None else inside & (numbers[RANK] == self.rank)


@dataclass(slots=True)
class Chosen:
    """The chunks that one answer reads: all that hold steps of its range, newest steps first.

    Where they are too many, `lo` is the first step of which all were chosen; it is beyond the
    range where not even one step was.
    """

    ids: list[int] = field(default_factory=list)
    lo: int | None = None
    is_cut: bool = False


def choose(connection: sa.Connection, wanted: Wanted, most_events: int = MAX_EVENTS) -> Chosen:
    """Return the chunks to read for a range of steps; of too many events the newest steps."""
    table = tables.chunk.c
    rows = connection.execute(
        sa.select(table.id, table.step_hi, table["count"])
        .where(*wanted.where())
        # of one rank its index is quicker than that of the steps of all ranks
        .order_by((table.step_hi if wanted.rank is None else table.step_hi + 0).desc())
        .limit(MAX_CHUNKS + 1)
    )
    chosen, events = Chosen(lo=wanted.lo), 0
    for number, step_hi, count in rows:
        events += count
        if len(chosen.ids) == MAX_CHUNKS or (events > most_events and chosen.ids):
            # Chunks that were not chosen reach up to this step, so that it is not complete.
            chosen.is_cut, chosen.lo = True, int(step_hi) + 1
            break
        chosen.ids.append(int(number))
    return chosen


@dataclass(frozen=True, slots=True)
class Part:
    """A decoded chunk; the rank of each event is among its numbers."""

    id: int
    attempt: int
    numbers: dict[str, Array]
    words: dict[str, Words]


def read(connection: sa.Connection, ids: Sequence[int], names: frozenset[str]) -> Iterator[Part]:
    """Yield chunks with the columns `names`, and the rank of each event.

    Without those that cannot be read, which the connection counts. Raises StoreUnavailableError.
    """
    names |= {RANK}
    table = tables.chunk.c
    for at in range(0, len(ids), READ_CHUNKS):
        rows = connection.execute(
            sa.select(table.id, table.attempt, table.rank, *PLACE).where(
                table.id.in_(ids[at : at + READ_CHUNKS])
            )
        ).all()
        for row, columns in decoded(connection, rows, names):
            words = {name: column for name, column in columns.items() if isinstance(column, Words)}
            numbers = {n: np.asarray(columns[n]) for n in columns if n not in words}
            if RANK not in numbers:
                length = len(next(iter(columns.values())))
                numbers[RANK] = np.broadcast_to(np.int64(row.rank), length)
            yield Part(row.id, row.attempt, numbers, words)


class Codes:
    """Numbers words: a column of any chunk becomes places in one list of words."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def of(self, column: Words, rows: Array) -> Array:
        """Return the places of the words in these rows of a column."""
        places = self._places
        known = [places.setdefault(word, len(places)) for word in column.words]
        return np.array(known, np.int64)[column.codes[rows]]

    @property
    def words(self) -> list[str]:
        """Return the words in the order of their places."""
        return list(self._places)
