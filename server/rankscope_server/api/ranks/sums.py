"""Exact sums of collectives over a range of steps, from its chunks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope.wire.schema import RETURNED
from rankscope_server.api.ranks.chunks import Chosen, Codes, Part, Wanted, choose, read
from rankscope_server.ingest.operations import (
    MAX_SUM_NS,
    NUM_BINS,
    OperationKey,
    OperationSum,
    bins_of,
    doublings_of,
)
from rankscope_server.store import tables

Array = np.ndarray[Any, np.dtype[Any]]
_NUMBERS = ("size_bytes", "duration_ns", "blocked_ns", "state")
_NAMES = frozenset((*_NUMBERS, "step", "operation", "group"))
MAX_KEYS = 8_192  # of which one answer has sums; of more, sizes are put into doublings
_EVENTS_AT_ONCE = 250_000  # that are held in memory as columns


@dataclass(slots=True)
class Sums:
    """What was counted; steps from `lo` on, and of which operations it says nothing."""

    by_key: dict[OperationKey, OperationSum] = field(default_factory=dict)
    lo: int | None = None
    is_cut: bool = False
    num_again: int = 0  # of steps that a later attempt ran again: only the later are counted
    attempts: set[int] = field(default_factory=set)

    def add(self, other: dict[OperationKey, OperationSum]) -> None:
        """Add sums."""
        for key, value in other.items():
            self.by_key.setdefault(key, OperationSum()).add(value)


def exact_sums(connection: sa.Connection, wanted: Wanted) -> Sums:
    """Return the sums of a range of steps, of each step those of the newest attempt that ran it.

    Where the range holds too much, its newest steps are counted, and `lo` says from which on; if
    one step alone is too much, those of its ranks that were read.
    """
    chosen = choose(connection, wanted)
    sums = Sums(lo=chosen.lo, is_cut=chosen.is_cut)
    again = {} if wanted.attempt is not None else steps_run_again(connection, wanted.run_id)
    columns = _Columns()
    counted = replace(wanted, lo=_first_step(chosen, wanted))
    for part in read(connection, chosen.ids, _NAMES):
        steps = part.numbers["step"]
        inside = counted.holds(part.numbers)
        for lo, hi in again.get(part.attempt, ()):
            is_again = inside & (steps >= lo) & (steps <= hi)
            sums.num_again += int(is_again.sum())
            inside &= ~is_again
        if inside.any():
            sums.attempts.add(part.attempt)
            columns.add(part, np.flatnonzero(inside))
        if columns.count > _EVENTS_AT_ONCE:
            sums.add(columns.sums())
            columns = _Columns()
    sums.add(columns.sums())
    return sums


def steps_run_again(connection: sa.Connection, run_id: str) -> dict[int, list[tuple[int, int]]]:
    """Return for each attempt the ranges of steps that later attempts ran, too."""
    table = tables.attempt.c
    rows = connection.execute(
        sa.select(table.attempt, table.step_lo, table.step_hi)
        .where(table.run_id == run_id, table.step_lo.is_not(None))
        .order_by(table.attempt)
    ).all()
    return {
        row.attempt: [(later.step_lo, later.step_hi) for later in rows[place + 1 :]]
        for place, row in enumerate(rows)
    }


def _first_step(chosen: Chosen, wanted: Wanted) -> int | None:
    """Return the first step that is counted."""
    if not chosen.is_cut or chosen.lo is None:
        return wanted.lo
    if wanted.hi is not None and chosen.lo > wanted.hi:
        return wanted.lo  # of no step all was chosen: what was is better than nothing
    return chosen.lo


class _Columns:
    """Columns of many chunks, joined."""

    def __init__(self) -> None:
        self.count = 0
        self._numbers: dict[str, list[Array]] = defaultdict(list)
        self._operations, self._groups = Codes(), Codes()

    def add(self, part: Part, rows: Array) -> None:
        """Add these rows of a chunk."""
        self.count += len(rows)
        for name in _NUMBERS:
            self._numbers[name].append(part.numbers[name][rows])
        self._numbers["operation"].append(self._operations.of(part.words["operation"], rows))
        self._numbers["group"].append(self._groups.of(part.words["group"], rows))

    def sums(self) -> dict[OperationKey, OperationSum]:
        """Return the sums of all rows."""
        if not self.count:
            return {}
        joined = {name: np.concatenate(parts) for name, parts in self._numbers.items()}
        operations, groups = self._operations.words, self._groups.words
        of_group = joined["operation"] * len(groups) + joined["group"]
        all_sizes = np.maximum(joined["size_bytes"], 0)
        sizes, size_at = _distinct(all_sizes)
        codes, places = _distinct(of_group * len(sizes) + size_at)
        if len(codes) > MAX_KEYS:
            sizes, size_at = _distinct(doublings_of(all_sizes))
            codes, places = _distinct(of_group * len(sizes) + size_at)
        counted = _by_place(joined, places, len(codes))
        found = {}
        for place, number in enumerate(codes.tolist()):
            rest, size = divmod(number, len(sizes))
            operation, group = divmod(rest, len(groups))
            key = OperationKey(operations[operation], groups[group], int(sizes[size]))
            found[key] = counted[place]
        return found


def _distinct(values: Array) -> tuple[Array, Array]:
    """Return the distinct values, sorted, and for each value its place among them."""
    distinct = np.unique(values)  # to find few values is quicker than to sort all with their places
    return distinct, np.searchsorted(distinct, values)


def _by_place(joined: dict[str, Array], places: Array, num_places: int) -> list[OperationSum]:
    """Return the sums of each place."""
    duration = joined["duration_ns"]
    ended = duration >= 0
    at, took = places[ended], duration[ended]
    least = np.full(num_places, np.iinfo(np.int64).max)
    largest = np.full(num_places, -1)
    np.minimum.at(least, at, took)
    np.maximum.at(largest, at, took)
    histograms = np.bincount(at * NUM_BINS + bins_of(took), minlength=num_places * NUM_BINS)
    histograms = histograms.reshape(num_places, NUM_BINS).astype("<i8")
    counts = np.bincount(places, minlength=num_places)
    is_open = np.bincount(places, joined["state"] <= RETURNED, num_places)
    blocked = np.bincount(places, np.maximum(joined["blocked_ns"], 0), num_places)
    total = np.bincount(at, took, num_places)
    found = []
    for place in range(num_places):
        result = OperationSum()
        result.count, result.open = int(counts[place]), int(is_open[place])
        result.blocked_ns = min(int(blocked[place]), MAX_SUM_NS)
        if largest[place] >= 0:
            result.sum_ns = min(int(total[place]), MAX_SUM_NS)
            result.min_ns, result.max_ns = int(least[place]), int(largest[place])
            result.histogram = histograms[place]
        found.append(result)
    return found
