"""Collectives and exchanges of one attempt, one row per operation and rank, in bounded memory.

Rows may come in any order and any number of times. When `capacity` rows are full, those of the
older half of the steps are dropped: what is asked for are the newest steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rankscope_server.findings.statistics import Array
from rankscope_server.observe.collectives import Collectives

# 63 bytes a row, 260 MB when full: 400 steps of 1,024 ranks with 10 operations a step.
CAPACITY = 1 << 22
_FIRST_ROWS = 4096
_GROWTH = 8  # memory that no row is in yet is none; what is copied is
_BLOCK = 1024  # steps
_NS_PER_MS = np.float32(1e6)
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
        self._rows_of_step: dict[int, Array] = {}  # by block of steps
        self._seen: dict[int, Array] = {}  # block -> ranks x steps: is there a row

    # --- writing -----------------------------------------------------------------------------

    def add(self, events: Collectives) -> None:
        """Take collectives of ranks."""
        steps = events["step"]
        # what is outside of steps is not asked for
        kept = np.flatnonzero(steps >= max(1, self.first_step))[: self.capacity // 2]
        count = len(kept)
        if not count:
            return
        if self.num_rows + count > self.capacity:
            self._drop()
        self._make_room(self.num_rows + count)
        place = slice(self.num_rows, self.num_rows + count)
        where = slice(None) if count == len(events) else kept
        for name, values in self._rows(events).items():
            self._cells[name][place] = values[where]
        self.num_rows += count
        self._note(events.rank[where], steps[where])

    def _note(self, ranks: Array, steps: Array) -> None:
        """Note which ranks have rows in which steps, and how many."""
        blocks = steps // _BLOCK
        is_one = blocks.min() == blocks.max()
        for block in blocks[:1].tolist() if is_one else np.unique(blocks).tolist():
            inside = slice(None) if is_one else blocks == block
            places, who = steps[inside] % _BLOCK, ranks[inside]
            counts = self._rows_of_step.setdefault(block, np.zeros(_BLOCK, np.int64))
            counts += np.bincount(places, minlength=_BLOCK)
            seen = self._seen.get(block, np.zeros((0, _BLOCK), bool))
            missing = int(who.max()) + 1 - len(seen)
            if missing > 0:
                seen = np.concatenate([seen, np.zeros((missing, _BLOCK), bool)])
            seen[who, places] = True
            self._seen[block] = seen

    def _rows(self, events: Collectives) -> dict[str, Array]:
        rows: dict[str, Array] = {
            name: events[name]
            for name in ("step", "arrived_ns", "sequence", "size_bytes", "state", "flags")
        }
        rows["rank"], rows["peer"] = events.rank, events["peer_rank"]
        for name in ("duration", "returned", "blocked"):
            rows[f"{name}_ms"] = _ms(events[f"{name}_ns"])
        rows["transfer_ms"] = _transfer_ms(events, rows["duration_ms"])
        for name in _WORDS:
            rows[name] = events.of_shapes(
                self._number(name, getattr(s, name)) for s in events.shapes
            )
        return rows

    def _number(self, name: str, word: str) -> int:
        known = self._words[name]
        return known.setdefault(word, min(len(known), _MAX_WORDS[name]))

    def _make_room(self, wanted: int) -> None:
        room = len(self._cells["step"])
        if wanted > room:
            room = min(self.capacity, max(wanted, _GROWTH * room))
            for name, cells in self._cells.items():
                self._cells[name] = np.empty(room, cells.dtype)
                self._cells[name][: self.num_rows] = cells[: self.num_rows]

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
        first, place = divmod(self.first_step, _BLOCK)
        self._seen = {block: seen for block, seen in self._seen.items() if block >= first}
        counts = {block: rows for block, rows in self._rows_of_step.items() if block >= first}
        if first in counts:
            counts[first][:place] = 0
        self._rows_of_step = counts

    # --- reading -----------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Return the memory that the rows may take; what no row was in yet takes none."""
        return sum(cells.nbytes for cells in self._cells.values())

    def count(self, steps: Array) -> int:
        """Return how many rows some steps have; it changes when one more comes."""
        blocks, places = divmod(steps, _BLOCK)
        return sum(
            int(self._rows_of_step[block][place])
            for block, place in zip(blocks.tolist(), places.tolist(), strict=True)
            if block in self._rows_of_step
        )

    def is_seen(self, rank: int, steps: Array) -> Array:
        """Return of which of some steps, from `first_step` on, a rank has a row."""
        found = np.zeros(len(steps), bool)
        blocks, places = divmod(steps, _BLOCK)
        for block in np.unique(blocks).tolist():
            seen = self._seen.get(block)
            if seen is not None and rank < len(seen):
                inside = blocks == block
                found[inside] = seen[rank, places[inside]]
        return found

    def words(self, name: str) -> list[str]:
        """Return the words of "group", "operation" or "dtype", by number."""
        return list(self._words[name])

    def select(self, steps: Array) -> dict[str, Array]:
        """Return the rows of some steps, each once, by rank, step and time."""
        held = self._cells["step"][: self.num_rows]
        if not len(steps):
            return {name: cells[:0] for name, cells in self._cells.items()}
        near = np.flatnonzero((held >= steps.min()) & (held <= steps.max()))
        wanted = np.zeros(int(steps.max() - steps.min()) + 1, bool)
        wanted[steps - steps.min()] = True
        rows = near[wanted[held[near] - steps.min()]]
        who = self._cells["rank"][rows].astype(np.int64) << 32 | held[rows]
        arrived_ns = self._cells["arrived_ns"][rows]
        order = np.lexsort((arrived_ns, who))
        rows, who, arrived_ns = rows[order], who[order], arrived_ns[order]
        is_tied = np.zeros(len(rows) + 1, bool)
        is_tied[1:-1] = (who[1:] == who[:-1]) & (arrived_ns[1:] == arrived_ns[:-1])
        tied = np.flatnonzero(is_tied[1:] | is_tied[:-1])
        if len(tied):  # few rows: only these may be the same
            rows[tied] = rows[tied][self._order_of(rows[tied])]
            rows = np.delete(rows, tied[self._is_repeated(rows[tied])])
        return {name: cells[rows] for name, cells in self._cells.items()}

    def _order_of(self, rows: Array) -> Array:
        """Return the order of rows; of those that are the same the one known further is last."""
        keys = [self._cells[name][rows] for name in ("duration_ms", "state", *reversed(_SAME))]
        return np.lexsort(keys)

    def _is_repeated(self, rows: Array) -> Array:
        """Return which rows are the same as the next one."""
        found = np.zeros(len(rows), bool)
        cells = [self._cells[name][rows] for name in _SAME]
        found[:-1] = np.all([values[1:] == values[:-1] for values in cells], axis=0)
        return found


def _ms(nanoseconds: Array) -> Array:
    """Return milliseconds (float32), -1 where they are not known."""
    milliseconds = nanoseconds.astype(np.float32)
    milliseconds /= _NS_PER_MS
    milliseconds[nanoseconds < 0] = -1.0
    return milliseconds


def _transfer_ms(events: Collectives, duration_ms: Array) -> Array:
    """Return how long the backend was at it: on the device, else since it began, else all."""
    device, started = _ms(events["device_duration_ns"]), _ms(events["started_ns"])
    since = np.where((started >= 0) & (duration_ms >= 0), duration_ms - started, duration_ms)
    return np.where(device >= 0, device, since)
