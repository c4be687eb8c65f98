"""Collectives of many chunks side by side, so that tables take them as arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rankscope.wire.chunk import Column
from rankscope_server.call_shapes import CallShape, ShapedCalls, shapes_of
from rankscope_server.findings.statistics import Array

# What tables look at, beside what all events of a shape have in common.
NUMBERS: tuple[str, ...] = (
    "sequence", "step", "arrived_ns", "started_ns", "duration_ns", "device_duration_ns",
    "returned_ns", "blocked_ns", "size_bytes", "input_bytes", "output_bytes", "peer_rank", "state",
    "flags",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RankCalls:
    """One decoded chunk of collectives of a rank."""

    rank: int
    columns: Mapping[str, Column]
    calls: ShapedCalls


@dataclass(frozen=True, slots=True)
class Collectives:
    """Events in the order they came; arrays of one length, whole numbers (int64)."""

    rank: Array
    numbers: dict[str, Array]  # by the names of columns, see `NUMBERS`
    codes: Array  # of each event, the place of its shape
    shapes: list[CallShape]  # each once

    @staticmethod
    def of(rank: int, columns: Mapping[str, Column]) -> Collectives:
        """Return the events of one chunk."""
        return side_by_side([RankCalls(rank, columns, shapes_of(columns))])

    def __len__(self) -> int:
        return len(self.rank)

    def __getitem__(self, name: str) -> Array:
        return self.numbers[name]

    def of_shapes(self, values: Iterable[int]) -> Array:
        """Return, for each event, the value of its shape."""
        found: Array = np.array(list(values), np.int64)[self.codes]
        return found

    def of_ranks(self, value_of: Callable[[int], int]) -> Array:
        """Return, for each event, the value of its rank."""
        table = np.bincount(self.rank)
        for rank in np.flatnonzero(table).tolist():
            table[rank] = value_of(rank)
        found: Array = table[self.rank]
        return found

    def by_group(self, chosen: Array) -> Iterator[tuple[str, Array]]:
        """Yield each group with its events of those `chosen` (ascending places), in their order."""
        groups: dict[str, int] = {}
        places = [groups.setdefault(shape.group, len(groups)) for shape in self.shapes]
        of_group = np.array(places)[self.codes[chosen]]
        order = np.argsort(of_group.astype(np.uint16) if len(groups) < 1 << 16 else of_group,
                           kind="stable")  # fmt: skip
        ends = np.cumsum(np.bincount(of_group, minlength=len(groups)))
        for group, begin, end in zip(groups, [0, *ends[:-1]], ends, strict=True):
            if end > begin:
                yield group, chosen[order[begin:end]]


def side_by_side(chunks: Sequence[RankCalls]) -> Collectives:
    """Return the events of some chunks, one after the other."""
    places: dict[CallShape, int] = {}
    codes = []
    for chunk in chunks:
        known = [places.setdefault(shape, len(places)) for shape in chunk.calls.shapes]
        codes.append(np.array(known, np.int64)[chunk.calls.codes])
    numbers = {
        name: np.concatenate([np.asarray(chunk.columns[name], np.int64) for chunk in chunks])
        for name in NUMBERS
    }
    ranks = np.array([chunk.rank for chunk in chunks], np.int64)
    return Collectives(
        rank=np.repeat(ranks, [len(chunk.calls.codes) for chunk in chunks]),
        numbers=numbers,
        codes=np.concatenate(codes),
        shapes=list(places),
    )
