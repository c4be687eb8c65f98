"""Collectives and exchanges of one attempt, one row per operation and rank, in bounded memory.

Rows may come in any order and any number of times. When `capacity` rows are full, those of the
older half of the steps are dropped: what is asked for are the newest steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rankscope.wire.chunk import Column
from rankscope_server.findings.statistics import Array

# 63 bytes a row, 260 MB when full: 400 steps of 1,024 ranks with 10 operations a step.
CAPACITY = 1 << 22
_FIRST_ROWS = 4096
_BLOCK = 1024  # steps
_MS = 1e-6
_TYPES: dict[str, Any] = {
    "rank": np.int32,
    "step": np.int32,
    "arrived_ns": np.int64,
    "duration_ms": np.float32,  # -1 not known, as the next
    "transfer_ms": np.float32,  # without what is known not to be transfer; -1 not known
    "returned_ms": np.float32,
    "blocked_ms": np.float32,
    "sequence": np.int64,
    "size_bytes": np.int64,
    "peer": np.int32,
    "state": np.int8,
    "flags": np.int16,
    "group": np.int32,  # numbers of words, as the next two
    "operation": np.int16,
    "dtype": np.int16,
}
_WORDS = ("group", "operation", "dtype")
_MAX_WORDS = {"group": 1 << 30, "operation": 1 << 14, "dtype": 1 << 14}
# What makes a row unique; of rows that are the same, the one known further is kept.
_SAME = ("rank", "step", "arrived_ns", "group", "operation", "peer", "sequence")


class EventTable:
    """The newest operations of one attempt."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self.num_rows = 0
        self.first_step = 0  # rows of earlier steps are gone
        self._cells = {name: np.zeros(_FIRST_ROWS, kind) for name, kind in _TYPES.items()}
        self._words: dict[str, dict[str, int]] = {name: {} for name in _WORDS}
        self._rows_of_step: dict[int, int] = {}
        self._seen: dict[tuple[int, int], int] = {}  # rank, block -> steps with a row, one bit each

    # --- writing -----------------------------------------------------------------------------

    def add(self, rank: int, columns: Mapping[str, Column]) -> None:
        """Take one chunk of collectives of one rank."""
        news = self._rows(rank, columns)
        keep = news["step"] >= max(1, self.first_step)  # what is outside of steps is not asked for
        keep &= np.cumsum(keep) <= self.capacity // 2
        count = int(keep.sum())
        if not count:
            return
        if self.num_rows + count > self.capacity:
            self._drop()
        self._make_room(self.num_rows + count)
        for name, cells in self._cells.items():
            cells[self.num_rows : self.num_rows + count] = news[name][keep]
        self.num_rows += count
        for step, rows in zip(*np.unique(news["step"][keep], return_counts=True), strict=True):
            self._rows_of_step[int(step)] = self._rows_of_step.get(int(step), 0) + int(rows)
            block, place = divmod(int(step), _BLOCK)
            self._seen[rank, block] = self._seen.get((rank, block), 0) | 1 << place

    def _rows(self, rank: int, columns: Mapping[str, Column]) -> dict[str, Array]:
        rows: dict[str, Array] = {
            "step": np.asarray(columns["step"], np.int64),
            "arrived_ns": np.asarray(columns["arrived_ns"], np.int64),
            "sequence": np.asarray(columns["sequence"], np.int64),
            "size_bytes": np.asarray(columns["size_bytes"], np.int64),
            "peer": np.asarray(columns["peer_rank"], np.int64),
            "state": np.asarray(columns["state"]),
            "flags": np.asarray(columns["flags"]),
        }
        rows["rank"] = np.full(len(rows["step"]), rank)
        for name in ("duration", "returned", "blocked"):
            nanoseconds = np.asarray(columns[f"{name}_ns"], np.int64)
            rows[f"{name}_ms"] = np.where(nanoseconds >= 0, nanoseconds * _MS, -1.0)
        rows["transfer_ms"] = _transfer_ms(columns, rows["duration_ms"])
        for name in _WORDS:
            rows[name] = self._numbers(name, columns[name])
        return rows

    def _numbers(self, name: str, words: Column) -> Array:
        known = self._words[name]
        try:
            found = [known[word] for word in words]
        except KeyError:
            for word in words:
                known.setdefault(str(word), min(len(known), _MAX_WORDS[name]))
            found = [known[word] for word in words]
        return np.array(found, np.int64)

    def _make_room(self, wanted: int) -> None:
        room = len(self._cells["step"])
        if wanted > room:
            room = min(self.capacity, max(wanted, 2 * room))
            for name, cells in self._cells.items():
                self._cells[name] = np.concatenate(
                    [cells, np.zeros(room - len(cells), cells.dtype)]
                )

    def _drop(self) -> None:
        """Forget the older half of the steps, or of the rows where all are of one step."""
        steps = self._cells["step"][: self.num_rows]
        middle = int(np.partition(steps, self.num_rows // 2)[self.num_rows // 2])
        kept = np.flatnonzero(steps > middle)
        if not len(kept):
            kept = np.flatnonzero(steps == middle)[-self.capacity // 4 :]
            middle -= 1
        for cells in self._cells.values():
            cells[: len(kept)] = cells[kept]
        self.num_rows = len(kept)
        self.first_step = middle + 1
        first = self.first_step // _BLOCK
        self._seen = {key: bits for key, bits in self._seen.items() if key[1] >= first}
        self._rows_of_step = {s: n for s, n in self._rows_of_step.items() if s > middle}

    # --- reading -----------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Return the memory of the rows."""
        return sum(cells.nbytes for cells in self._cells.values())

    def count(self, steps: Array) -> int:
        """Return how many rows some steps have; it changes when one more comes."""
        return sum(self._rows_of_step.get(int(step), 0) for step in steps)

    def is_seen(self, rank: int, steps: Array) -> Array:
        """Return of which of some steps, from `first_step` on, a rank has a row."""
        places = (divmod(step, _BLOCK) for step in steps.tolist())
        return np.array([self._seen.get((rank, block), 0) >> at & 1 for block, at in places], bool)

    def words(self, name: str) -> list[str]:
        """Return the words of "group", "operation" or "dtype", by number."""
        return list(self._words[name])

    def select(self, steps: Array) -> dict[str, Array]:
        """Return the rows of some steps, each once, by rank, step and time."""
        held = self._cells["step"][: self.num_rows]
        if not len(steps):
            return {name: cells[:0] for name, cells in self._cells.items()}
        near = np.flatnonzero((held >= steps.min()) & (held <= steps.max()))
        rows = near[np.isin(held[near], steps)]
        found = {name: cells[rows] for name, cells in self._cells.items()}
        order = np.lexsort(
            (found["duration_ms"], found["state"], *(found[name] for name in reversed(_SAME)))
        )
        found = {name: cells[order] for name, cells in found.items()}
        last = np.ones(len(order), bool)
        if len(order):
            changes = [found[name][1:] != found[name][:-1] for name in _SAME]
            last[:-1] = np.any(changes, axis=0)
        return {name: cells[last] for name, cells in found.items()}


def _transfer_ms(columns: Mapping[str, Column], duration_ms: Array) -> Array:
    """Return how long the backend was at it: on the device, else since it began, else all."""
    device, started = (
        np.asarray(columns[name], np.int64) * _MS for name in ("device_duration_ns", "started_ns")
    )
    since = np.where((started >= 0) & (duration_ms >= 0), duration_ms - started, duration_ms)
    return np.where(device >= 0, device, since)
