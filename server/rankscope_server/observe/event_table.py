"""Collectives and exchanges of one attempt, as the chunks that they came in, in bounded memory.

Hardly any of them is ever looked at: detectors ask for the newest steps, once in a while. So rows
are made when steps are asked for, of the few bytes that a chunk takes; of what comes it is only
noted which ranks have rows in which steps.

Chunks may come in any order and any number of times. When they hold too many rows or bytes, those
that end earliest are dropped, up to half of all: what is asked for are the newest steps.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from rankscope.wire.arrays import distinct
from rankscope.wire.chunk import RANK, Column, Words, decode_chunks
from rankscope_server.findings.statistics import Array
from rankscope_server.observe.collectives import Collectives, RankCalls

# 400 steps of 1,024 ranks with 10 operations a step; of 5 to 9 bytes as ranks of a node send them.
CAPACITY = 1 << 22
MAX_BYTES = 128 << 20
_BYTES_PER_CHUNK = 300  # beside what it holds
_ROWS_AT_ONCE = 200_000  # that are made of chunks: what is unpacked takes twice as much as a row
_BLOCK = 1024  # steps
_CHUNKS_JOINED = 128
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
_NUMBERS = (
    "step", "arrived_ns", "duration_ns", "device_duration_ns", "started_ns", "returned_ns",
    "blocked_ns", "sequence", "size_bytes", "peer_rank", "state", "flags",
)  # fmt: skip
_WANTED = frozenset({*_NUMBERS, *_WORDS, RANK})
# What makes a row unique; of rows that are the same, the one known further is kept.
_SAME = ("rank", "step", "arrived_ns", "group", "operation", "peer", "sequence")


class _Held(NamedTuple):
    """One chunk."""

    data: bytes
    rank: int  # of a chunk of one rank
    num_rows: int
    first_step: int
    last_step: int

    @property
    def num_bytes(self) -> int:
        """Return the memory that it takes."""
        return len(self.data) + _BYTES_PER_CHUNK


class EventTable:
    """The newest operations of one attempt."""

    def __init__(self, capacity: int = CAPACITY, max_bytes: int = MAX_BYTES) -> None:
        self._capacity, self._max_bytes = capacity, max_bytes
        self.num_rows = 0
        self.num_bytes = 0  # of the chunks
        self.first_step = 1  # rows of earlier steps are gone, or were outside of steps
        self._held: list[_Held] = []
        self._words: dict[str, dict[str, int]] = {name: {} for name in _WORDS}
        self._rows_of_step: dict[int, Array] = {}  # by block of steps
        self._seen: dict[int, Array] = {}  # block -> ranks x steps: is there a row
        self._numbering = threading.Lock()  # of words: snapshots are read in other threads

    def __getstate__(self) -> dict[str, Any]:
        """Join the bytes of chunks: a block of them is the same as long as all are held."""
        blocks = [self._held[at : at + _CHUNKS_JOINED] for at in range(0, len(self._held),
                                                                       _CHUNKS_JOINED)]  # fmt: skip
        joined = [
            (
                pickle.PickleBuffer(b"".join(held.data for held in block)),
                [(len(held.data), *held[1:]) for held in block],
            )
            for block in blocks
        ]
        state = self.__dict__ | {"_held": joined}
        del state["_numbering"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        held: list[_Held] = []
        for buffer, rows in state["_held"]:
            data, at = memoryview(buffer), 0
            for num_bytes, *rest in rows:
                held.append(_Held(bytes(data[at : at + num_bytes]), *rest))
                at += num_bytes
        self.__dict__.update(state | {"_held": held, "_numbering": threading.Lock()})

    # --- writing -----------------------------------------------------------------------------

    def add(self, chunks: Sequence[RankCalls], events: Collectives) -> None:
        """Take chunks of collectives; `events` are theirs, side by side."""
        steps = events["step"]
        begins = np.cumsum([0, *(len(chunk.calls.codes) for chunk in chunks[:-1])])
        first = np.minimum.reduceat(steps, begins).tolist()
        last = np.maximum.reduceat(steps, begins).tolist()
        for chunk, begin, first_step, last_step in zip(
            chunks, begins.tolist(), first, last, strict=True
        ):
            if last_step < self.first_step:
                continue  # what is outside of steps is not asked for
            rank = int(events.rank[begin])
            held = _Held(chunk.data, rank, len(chunk.calls.codes), first_step, last_step)
            self._held.append(held)
            self.num_rows += held.num_rows
            self.num_bytes += held.num_bytes
        self._note(events.rank, steps)
        if self.num_rows > self._capacity or self.num_bytes > self._max_bytes:
            self._drop()

    def _note(self, ranks: Array, steps: Array) -> None:
        """Note which ranks have rows in which steps, and how many."""
        is_other = np.ones(len(steps), bool)
        is_other[1:] = (steps[1:] != steps[:-1]) | (ranks[1:] != ranks[:-1])
        begins = np.flatnonzero(is_other)
        counts = np.diff(begins, append=len(steps))
        kept = steps[begins] >= self.first_step
        ranks, steps, counts = ranks[begins][kept], steps[begins][kept], counts[kept]
        blocks = steps // _BLOCK
        for block in distinct(blocks).tolist():
            inside = blocks == block
            places, who = steps[inside] % _BLOCK, ranks[inside]
            rows = self._rows_of_step.setdefault(block, np.zeros(_BLOCK, np.int64))
            np.add.at(rows, places, counts[inside])
            seen = self._seen.get(block, np.zeros((0, _BLOCK), bool))
            missing = int(who.max()) + 1 - len(seen)
            if missing > 0:
                more = max(missing, len(seen) // 2)  # ranks come in their order
                seen = np.concatenate([seen, np.zeros((more, _BLOCK), bool)])
            seen[who, places] = True
            self._seen[block] = seen

    def _drop(self) -> None:
        """Forget the chunks that end earliest, until half of the room is free."""
        by_end = sorted(self._held, key=lambda held: held.last_step)
        gone = 0
        for held in by_end[:-1]:
            if self.num_rows <= self._capacity // 2 and self.num_bytes <= self._max_bytes // 2:
                break
            self.num_rows -= held.num_rows
            self.num_bytes -= held.num_bytes
            gone += 1
        self._held = by_end[gone:]
        if not gone:
            return
        # where all are of one step, rows of it are gone and others are there
        self.first_step = min(by_end[gone - 1].last_step + 1, by_end[-1].last_step)
        first, place = divmod(self.first_step, _BLOCK)
        self._seen = {block: seen for block, seen in self._seen.items() if block >= first}
        counts = {block: rows for block, rows in self._rows_of_step.items() if block >= first}
        if first in counts:
            counts[first][:place] = 0
        self._rows_of_step = counts

    # --- reading -----------------------------------------------------------------------------

    def snapshot(self) -> EventTable:
        """Return a table from which the same rows can be selected, whatever comes to this one."""
        found = EventTable.__new__(EventTable)
        found.__dict__.update(
            self.__dict__ | {"_held": list(self._held), "_rows_of_step": {}, "_seen": {}}
        )
        return found

    def count(self, steps: Array) -> int:
        """Return how many rows some steps have; it changes when one more comes."""
        blocks, places = divmod(steps, _BLOCK)
        return sum(
            int(self._rows_of_step[block][place])
            for block, place in zip(blocks.tolist(), places.tolist(), strict=True)
            if block in self._rows_of_step
        )

    def most_rows(self, steps: Array) -> int:
        """Return how many rows the largest of some steps has."""
        blocks, places = divmod(steps, _BLOCK)
        found = [
            self._rows_of_step[block][places[blocks == block]].max()
            for block in distinct(blocks).tolist()
            if block in self._rows_of_step
        ]
        return int(max(found, default=0))

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
        """Return the words of "group", "operation" or "dtype" that rows had so far, by number."""
        return list(self._words[name])

    def select(self, steps: Array) -> dict[str, Array]:
        """Return the rows of some steps, each once, by rank, step and time."""
        parts = list(self._parts(np.unique(steps[steps >= self.first_step])))
        rows = {
            name: np.concatenate([part[name] for part in parts] or [np.zeros(0, kind)])
            for name, kind in _TYPES.items()
        }
        who = rows["rank"].astype(np.int64) << 32 | rows["step"]
        order = np.argsort(who, kind="stable")  # quick: each chunk is in order
        who, arrived_ns = who[order], rows["arrived_ns"][order]
        is_tied = np.zeros(len(order) + 1, bool)
        is_same = who[1:] == who[:-1]
        if (is_same & (arrived_ns[1:] < arrived_ns[:-1])).any():  # not by time: those of two chunks
            by_time = np.lexsort((arrived_ns, who))
            order, arrived_ns = order[by_time], arrived_ns[by_time]
        is_tied[1:-1] = is_same & (arrived_ns[1:] == arrived_ns[:-1])
        tied = np.flatnonzero(is_tied[1:] | is_tied[:-1])
        if len(tied):  # few rows: only these may be the same
            order[tied] = order[tied][_order_of(rows, order[tied])]
            order = np.delete(order, tied[_is_repeated(rows, order[tied])])
        return {name: cells[order] for name, cells in rows.items()}

    def _parts(self, steps: Array) -> Iterator[dict[str, Array]]:
        """Yield the rows of some steps (ascending), unpacked of some chunks at a time."""
        near = [held for held in self._held if _has_any(held, steps)]
        columns: dict[str, list[Array]] = {}
        num_rows = 0
        unpacked = decode_chunks((held.data for held in near), _WANTED)
        for held, decoded in zip(near, unpacked, strict=True):
            chosen = _places_in(np.asarray(decoded["step"]), steps)
            num_rows += len(chosen)
            numbers = {name: np.asarray(decoded[name]) for name in _NUMBERS}
            numbers |= {name: self._numbers(name, decoded[name]) for name in _WORDS}
            of_one = np.broadcast_to(held.rank, held.num_rows)
            numbers["rank"] = np.asarray(decoded.get(RANK, of_one))
            for name, column in numbers.items():
                columns.setdefault(name, []).append(column[chosen])
            if num_rows > _ROWS_AT_ONCE:
                yield _rows({name: np.concatenate(part) for name, part in columns.items()})
                columns, num_rows = {}, 0
        if columns:
            yield _rows({name: np.concatenate(part) for name, part in columns.items()})

    def _numbers(self, name: str, column: Column) -> Array:
        """Return the numbers of the words of a column."""
        coded, known = Words.of(column), self._words[name]
        most = _MAX_WORDS[name]
        with self._numbering:
            numbers = [known.setdefault(word, min(len(known), most)) for word in coded.words]
        found: Array = np.array(numbers, _TYPES[name])[coded.codes]
        return found


def _has_any(held: _Held, steps: Array) -> bool:
    """Return whether some of these steps (ascending) may be in a chunk."""
    begin = int(np.searchsorted(steps, held.first_step))
    return begin < len(steps) and int(steps[begin]) <= held.last_step


def _places_in(column: Array, steps: Array) -> Array:
    """Return the places of a column whose step is one of some (ascending)."""
    near: Array = np.flatnonzero((column >= steps[0]) & (column <= steps[-1]))
    if int(steps[-1]) - int(steps[0]) == len(steps) - 1:
        return near
    wanted = np.zeros(int(steps[-1] - steps[0]) + 1, bool)
    wanted[steps - steps[0]] = True
    found: Array = near[wanted[column[near] - steps[0]]]
    return found


def _rows(columns: dict[str, Array]) -> dict[str, Array]:
    """Return the rows of decoded columns, in the types of the table."""
    names = {"peer": "peer_rank"}
    rows = {
        name: columns[names.get(name, name)].astype(kind)
        for name, kind in _TYPES.items()
        if not name.endswith("_ms")
    }
    for name in ("duration", "returned", "blocked"):
        rows[f"{name}_ms"] = _ms(columns[f"{name}_ns"])
    rows["transfer_ms"] = _transfer_ms(columns, rows["duration_ms"])
    return rows


def _order_of(rows: dict[str, Array], places: Array) -> Array:
    """Return the order of rows; of those that are the same the one known further is last."""
    keys = [rows[name][places] for name in ("duration_ms", "state", *reversed(_SAME))]
    return np.lexsort(keys)


def _is_repeated(rows: dict[str, Array], places: Array) -> Array:
    """Return which rows are the same as the next one."""
    found = np.zeros(len(places), bool)
    cells = [rows[name][places] for name in _SAME]
    found[:-1] = np.all([values[1:] == values[:-1] for values in cells], axis=0)
    return found


def _ms(nanoseconds: Array) -> Array:
    """Return milliseconds (float32), -1 where they are not known."""
    milliseconds = nanoseconds.astype(np.float32)
    milliseconds /= _NS_PER_MS
    milliseconds[nanoseconds < 0] = -1.0
    return milliseconds


def _transfer_ms(columns: dict[str, Array], duration_ms: Array) -> Array:
    """Return how long the backend was at it: on the device, else since it began, else all."""
    device, started = _ms(columns["device_duration_ns"]), _ms(columns["started_ns"])
    since = np.where((started >= 0) & (duration_ms >= 0), duration_ms - started, duration_ms)
    return np.where(device >= 0, device, since)
