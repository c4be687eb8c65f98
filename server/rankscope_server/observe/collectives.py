"""Collectives of many chunks side by side, so that tables take them as arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rankscope.wire.chunk import Column
from rankscope_server.call_shapes import CallShape, ShapedCalls, shapes_of
from rankscope_server.findings.statistics import Array

# What tables look at, beside what all events of a shape have in common.
NUMBERS: tuple[str, ...] = (
    "sequence", "step", "arrived_ns", "duration_ns", "input_bytes", "output_bytes", "state",
    "flags",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RankCalls:
    """One decoded chunk of collectives of a rank, or of the rank of each event."""

    rank: int | Array
    columns: Mapping[str, Column]
    calls: ShapedCalls
    data: bytes = b""  # the chunk itself


@dataclass(frozen=True, eq=False)
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

    def where(self, chosen: Array, names: Sequence[str] = NUMBERS) -> Collectives:
        """Return some of the events, with some of the columns."""
        numbers = {name: self.numbers[name][chosen] for name in names}
        return Collectives(self.rank[chosen], numbers, self.codes[chosen], self.shapes)

    def of_shapes(self, values: Iterable[int]) -> Array:
        """Return, for each event, the value of its shape."""
        found: Array = np.array(list(values), np.int64)[self.codes]
        return found

    def of_ranks(self, value_of: Callable[[int], int], chosen: Array) -> Array:
        """Return, for each of some events, the value of its rank."""
        return _looked_up(self.rank[chosen], value_of)

    @property
    def groups(self) -> list[str]:
        """Return the groups, in the order in which shapes name them."""
        return self._groups[0]

    def of_groups(self, value_of: Callable[[str], int], chosen: Array | slice) -> Array:
        """Return, for each of some events, the value of its group."""
        groups, of_shape = self._groups
        return _looked_up(of_shape[self.codes[chosen]], lambda place: value_of(groups[place]))

    @cached_property
    def _groups(self) -> tuple[list[str], Array]:
        """Return the groups, and the place of its group for each shape."""
        places: dict[str, int] = {}
        of_shape = [places.setdefault(shape.group, len(places)) for shape in self.shapes]
        return list(places), np.array(of_shape)

    def by_group(self, chosen: Array) -> Iterator[tuple[str, Array]]:
        """Yield each group with its events of those `chosen` (ascending places), in their order."""
        for group, places in self.places_by_group(chosen):
            yield group, chosen[places]

    def places_by_group(self, chosen: Array) -> Iterator[tuple[str, Array]]:
        """Yield each group with the places of its events among those `chosen`, in their order."""
        groups, of_shape = self._groups
        of_group = of_shape[self.codes[chosen]]
        order = np.argsort(of_group.astype(np.uint16) if len(groups) < 1 << 16 else of_group,
                           kind="stable")  # fmt: skip
        ends = np.cumsum(np.bincount(of_group, minlength=1))
        for place in np.flatnonzero(np.diff(ends, prepend=0)).tolist():
            begin = int(ends[place - 1]) if place else 0
            yield groups[place], order[begin : int(ends[place])]


def _looked_up(keys: Array, value_of: Callable[[int], int]) -> Array:
    """Return the value of each key; keys are small whole numbers."""
    table = np.bincount(keys)
    for key in np.flatnonzero(table).tolist():
        table[key] = value_of(key)
    found: Array = table[keys]
    return found


def joined(parts: Sequence[Collectives]) -> Collectives:
    """Return events with the same columns, one after the other."""
    places: dict[CallShape, int] = {}
    codes = [
        np.array([places.setdefault(one, len(places)) for one in part.shapes])[part.codes]
        for part in parts
    ]
    numbers = {
        name: np.concatenate([part.numbers[name] for part in parts]) for name in parts[0].numbers
    }
    ranks = np.concatenate([part.rank for part in parts])
    return Collectives(ranks, numbers, np.concatenate(codes), list(places))


def side_by_side(chunks: Sequence[RankCalls]) -> Collectives:
    """Return the events of some chunks, one after the other."""
    places: dict[CallShape, int] = {}
    known: dict[int, Array] = {}  # by the identity of shapes: many chunks share theirs
    codes = []
    for chunk in chunks:
        shapes = chunk.calls.shapes
        found = known.get(id(shapes))
        if found is None:
            found = np.array([places.setdefault(one, len(places)) for one in shapes], np.int64)
            known[id(shapes)] = found
        codes.append(found[chunk.calls.codes])
    ranks = [np.broadcast_to(chunk.rank, len(chunk.calls.codes)) for chunk in chunks]
    return Collectives(
        rank=np.concatenate(ranks).astype(np.int64, copy=False),
        numbers=_Joined(chunks),
        codes=np.concatenate(codes),
        shapes=list(places),
    )


class _Joined(dict[str, Array]):
    """The columns of some chunks one after the other, each made when it is asked for."""

    def __init__(self, chunks: Sequence[RankCalls]) -> None:
        super().__init__()
        self._chunks = chunks

    def __missing__(self, name: str) -> Array:
        columns = [np.asarray(chunk.columns[name], np.int64) for chunk in self._chunks]
        self[name] = found = _as_one(columns)
        return found


def _as_one(columns: Sequence[Array]) -> Array:
    """Return columns one after the other; where all hold one value, that takes no memory."""
    if all(len(column) and column.strides == (0,) for column in columns):
        values = {int(column[0]) for column in columns}
        if len(values) == 1:
            return np.broadcast_to(np.int64(values.pop()), sum(map(len, columns)))
    return np.concatenate(columns)
