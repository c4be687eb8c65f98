"""Steps of many chunks side by side, so that tables take them as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rankscope.wire.chunk import RANK, Column, begins_of
from rankscope_server.findings.statistics import Array

MAX_SPAN = 512  # step numbers that are taken at once: a table makes room for them in one go


@dataclass(frozen=True, slots=True)
class RankSteps:
    """Steps in the order they came: one stretch for each rank of each chunk."""

    ranks: Array  # of each stretch
    begins: Array  # place of the first step of each stretch
    columns: Mapping[str, Array]  # all of one length; a column of the schema may be missing

    @staticmethod
    def of(rank: int, columns: Mapping[str, Column]) -> RankSteps:
        """Return the steps of one chunk."""
        numbers = {name: np.asarray(column) for name, column in columns.items()}
        return RankSteps(np.array([rank]), np.zeros(1, np.int64), numbers)

    def each(self, per_stretch: Array) -> Array:
        """Return, for each step, the value of its stretch."""
        ends = np.append(self.begins[1:], len(self.columns["step"]))
        found: Array = np.repeat(per_stretch, ends - self.begins)
        return found


def stretches(chunks: Sequence[tuple[int, Mapping[str, Column]]]) -> Iterator[RankSteps]:
    """Yield the steps of some chunks (rank, columns), those together that are near each other.

    Of a chunk of several ranks the columns say which.
    """
    near: list[tuple[int, Mapping[str, Column]]] = []
    names: tuple[str, ...] = ()
    low = high = 0
    for rank, columns in chunks:
        steps = np.asarray(columns["step"])
        if not len(steps):
            continue
        first, last = int(steps.min()), int(steps.max())
        if near and (tuple(columns) != names or max(high, last) - min(low, first) >= MAX_SPAN):
            yield _together(near)
            near = []
        low, high = (min(low, first), max(high, last)) if near else (first, last)
        names = tuple(columns)
        near.append((rank, columns))
    if near:
        yield _together(near)


def _together(chunks: Sequence[tuple[int, Mapping[str, Column]]]) -> RankSteps:
    numbers = {
        name: np.concatenate([np.asarray(columns[name]) for _, columns in chunks])
        for name in chunks[0][1]
        if name != RANK
    }
    ranks: list[int] = []
    begins: list[int] = []
    length = 0
    for rank, columns in chunks:
        of_events = columns.get(RANK)
        firsts = [0] if of_events is None else begins_of(np.asarray(of_events))
        ranks += [rank] if of_events is None else np.asarray(of_events)[firsts].tolist()
        begins += [length + first for first in firsts]
        length += len(columns["step"])
    return RankSteps(np.array(ranks), np.array(begins), numbers)
