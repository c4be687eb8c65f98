"""Calls that the ranks of one chunk made alike: one event stands for those of all of them.

Ranks of a node make the same calls in the same order, so whether they do is looked at once for all
their events, and what they called once for all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rankscope.wire.arrays import begins_of_runs
from rankscope_server.findings.statistics import Array
from rankscope_server.observe.collectives import RankCalls

_LEAST_SAVED = 0.5  # of the events of some chunks, else all are taken each for itself


class Callers(NamedTuple):
    """Sets of ranks. Of a smaller one than the largest the first rank is repeated."""

    ranks: Array  # sets x members
    shifts: Array  # the same: how many places after the event of the first that of a member is
    sizes: Array  # of each set


class Alike(NamedTuple):
    """Some events of all, and for which ranks each of them stands."""

    places: Array
    callers: Callers
    of: Array  # of each of these events, its set of ranks


class _Part(NamedTuple):
    """Events of a chunk, one after the other, and the ranks that made the same calls."""

    begin: int
    end: int
    ranks: tuple[int, ...]
    shifts: tuple[int, ...] = (0,)


def alike(chunks: Sequence[RankCalls]) -> Alike | None:
    """Return events that stand for all events of some chunks; None where they would be many.

    Places are those of the events of the chunks side by side.
    """
    parts, at = [], 0
    for chunk in chunks:
        parts += [
            part._replace(begin=at + part.begin, end=at + part.end) for part in _parts_of(chunk)
        ]
        at += len(chunk.calls.codes)
    begins, ends = (np.array([part[edge] for part in parts], np.int64) for edge in (0, 1))
    sizes = ends - begins
    if not parts or sizes.sum() > (1 - _LEAST_SAVED) * at:
        return None
    of = np.repeat(np.arange(len(parts)), sizes)
    places = np.arange(len(of)) + np.repeat(begins - np.cumsum(sizes) + sizes, sizes)
    width = max(len(part.ranks) for part in parts)
    ranks, shifts = (
        np.array([one + one[:1] * (width - len(one)) for one in column], np.int64)
        for column in ([part.ranks for part in parts], [part.shifts for part in parts])
    )
    return Alike(places, Callers(ranks, shifts, np.array([len(part.ranks) for part in parts])), of)


def _parts_of(chunk: RankCalls) -> Iterator[_Part]:
    """Yield the events of a chunk: of its ranks together what they called alike, the rest apart."""
    count = len(chunk.calls.codes)
    if isinstance(chunk.rank, int):
        yield _Part(0, count, (chunk.rank,))
        return
    begins = begins_of_runs(chunk.rank)
    ends = np.append(begins[1:], count)
    ranks = tuple(chunk.rank[begins].tolist())
    low, num = _together(chunk, begins, ends)
    if num:
        shifts = tuple((low - low[0]).tolist())
        yield _Part(int(low[0]), int(low[0]) + num, ranks, shifts)
    edges = zip(ranks, begins.tolist(), low.tolist(), ends.tolist(), strict=True)
    for rank, begin, middle, end in edges:
        if middle > begin:
            yield _Part(begin, middle, (rank,))
        if end > middle + num:
            yield _Part(middle + num, end, (rank,))


def _together(chunk: RankCalls, begins: Array, ends: Array) -> tuple[Array, int]:
    """Return from where on each rank made the same calls, and how many; 0 for none.

    All events of the chunk, or those of the steps that are whole on all its ranks.
    """
    sizes = ends - begins
    columns = np.asarray(chunk.columns["sequence"]), chunk.calls.codes
    num = int(sizes[0])
    if (sizes == num).all() and all(_is_alike(column.reshape(-1, num)) for column in columns):
        return begins, num
    steps = np.asarray(chunk.columns["step"])
    first, last = int(steps[begins].max()) + 1, int(steps[ends - 1].min()) - 1
    if last < first or not (sizes > 0).all():
        return begins, 0
    low, high = (
        np.array([
            begin + np.searchsorted(steps[begin:end], step)
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
        ])
        for step in (first, last + 1)
    )  # fmt: skip
    num = int(high[0] - low[0])
    if num <= 0 or not (high - low == num).all():
        return begins, 0
    places = low[:, None] + np.arange(num)
    return (low, num) if all(_is_alike(column[places]) for column in columns) else (begins, 0)


def _is_alike(rows: Array) -> bool:
    return bool((rows[1:] == rows[0]).all())
