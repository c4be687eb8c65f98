"""How many lines match: by rank, level, host, logger, stream, run and project, and over time.

Blocks of which all lines of a kind match are counted from their tallies, so that ten million
lines take some milliseconds; of others the lines themselves are counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rankscope_server.store.line_filter import Lines, Tallies
from rankscope_server.store.line_kinds import COLUMNS

Array = np.ndarray[Any, np.dtype[Any]]
DIMENSIONS = ("rank", "level", "host", "logger", "stream")
OF_ALL_RUNS = (*DIMENSIONS, "run", "project")  # of a search over several
MAX_READ_BLOCKS = 64  # that cross an edge of the histogram and are read for it
_LEVEL = COLUMNS.index("level")


@dataclass(slots=True)
class Histogram:
    """Lines per level and slice of time, in nanoseconds."""

    start_ns: int
    bucket_ns: int
    levels: dict[int, Array]  # counts of each bucket, by level
    is_exact: bool = True  # False: blocks that cross an edge are spread evenly over their time


class _Part(NamedTuple):
    """Values of a dimension, how many lines each stands for, and the names of numbers."""

    values: Array
    counts: Array
    names: dict[int, str]


@dataclass(slots=True)
class Counts:
    """What was counted."""

    total: int = 0
    dimensions: tuple[str, ...] = DIMENSIONS
    _parts: defaultdict[str, list[_Part]] = field(default_factory=lambda: defaultdict(list))
    _times: list[Array] = field(default_factory=list)
    _levels: list[Array] = field(default_factory=list)
    # of blocks: id, first and last time, level and count, a row for each level of a block
    _blocks: list[Array] = field(default_factory=list)

    def add_tallies(
        self, tallies: Tallies, block_ids: Array, base: Array, masks: dict[str, Array]
    ) -> None:
        """Count rows of tallies; `base` matches the query, `masks` each of the filters."""
        everything = np.where(base & _all_but(masks, ""), tallies.num_lines, 0)
        of_kind = np.bincount(tallies.kind, everything, len(tallies.kinds))
        of_block = {"host": tallies.host, "run": tallies.run, "project": tallies.run}
        for name in self.dimensions:
            is_filtered = name in masks  # then its own filter does not count
            count = everything
            if is_filtered:
                count = np.where(base & _all_but(masks, name), tallies.num_lines, 0)
            if name in of_block:
                values, sums = of_block[name], np.bincount(tallies.at, count, len(tallies.host))
            else:
                values, sums = tallies.kinds[:, COLUMNS.index(name)], of_kind
                if is_filtered:
                    sums = np.bincount(tallies.kind, count, len(tallies.kinds))
            found = np.flatnonzero(sums)
            names = _names(name, tallies)
            self._parts[name].append(_Part(values[found], sums[found], names))
        self.total += int(everything.sum())
        kinds_of_level, level = np.unique(tallies.kinds[:, _LEVEL], return_inverse=True)
        size = len(kinds_of_level)
        sums = np.bincount(
            tallies.at * size + level[tallies.kind], everything, len(block_ids) * size
        )
        found = np.flatnonzero(sums)
        at = found // size
        columns = (
            block_ids[at], tallies.time_lo_ns[at], tallies.time_hi_ns[at],
            kinds_of_level[found % size], sums[found].astype(np.int64),
        )  # fmt: skip
        self._blocks.append(np.stack(columns))

    def add_lines(self, lines: Lines, base: Array, masks: dict[str, Array]) -> None:
        """Count lines of a block."""
        head = lines.head
        everything = base & _all_but(masks, "")
        of_block = {"host": lines.host, "run": lines.run, "project": lines.run}
        for name in self.dimensions:
            chosen = base & _all_but(masks, name) if name in masks else everything
            if name in of_block:
                values, counts = np.array([of_block[name]]), np.array([np.count_nonzero(chosen)])
            else:
                values = getattr(head, name)[chosen]
                counts = np.ones(len(values), np.int64)
            self._parts[name].append(_Part(values, counts, _names(name, lines)))
        self.total += int(np.count_nonzero(everything))
        self._times.append(head.time_ns[everything])
        self._levels.append(head.level[everything])

    def facet(self, name: str) -> Counter[Any]:
        """Return how many lines there are of each value of a dimension."""
        parts = self._parts[name]
        found: Counter[Any] = Counter()
        if not parts:
            return found
        kinds, places = np.unique(
            np.concatenate([part.values for part in parts]), return_inverse=True
        )
        sums = np.bincount(places, np.concatenate([part.counts for part in parts]))
        names = parts[0].names if name not in ("rank", "level") else None
        for kind, number in zip(kinds.tolist(), sums.tolist(), strict=True):
            if number:
                found[kind if names is None else names[kind]] += int(number)
        return found

    def span(self) -> tuple[int, int] | None:
        """Return the first and the last time of what was counted; None for nothing."""
        lows = [block[1].min() for block in self._blocks if block.size]
        highs = [block[2].max() for block in self._blocks if block.size]
        times = [part for part in self._times if part.size]
        lows += [part.min() for part in times]
        highs += [part.max() for part in times]
        return (int(min(lows)), int(max(highs))) if lows else None

    def histogram(
        self,
        start_ns: int,
        bucket_ns: int,
        num_buckets: int,
        read: Callable[[list[int]], tuple[Array, Array]],
    ) -> Histogram:
        """Return how many lines of each level are in each bucket.

        `read` gives times and levels of the matching lines of blocks.
        """
        histogram = Histogram(start_ns, bucket_ns, {})

        def add(places: Array, levels: Array, counts: Array) -> None:
            places = np.clip(places, 0, num_buckets - 1)
            for level in np.unique(levels).tolist():
                chosen = levels == level
                sums = np.bincount(places[chosen], weights=counts[chosen], minlength=num_buckets)
                known = histogram.levels.get(level, np.zeros(num_buckets))
                histogram.levels[level] = known + sums

        def add_lines(times: Array, levels: Array) -> None:
            add((times - start_ns) // bucket_ns, levels, np.ones(len(times)))

        if self._times:
            add_lines(np.concatenate(self._times), np.concatenate(self._levels))
        if self._blocks:
            ids, lo, hi, levels, counts = np.concatenate(self._blocks, axis=1)
            first, last = (lo - start_ns) // bucket_ns, (hi - start_ns) // bucket_ns
            is_inside = first == last
            add(first[is_inside], levels[is_inside], counts[is_inside])
            crossing = np.unique(ids[~is_inside])
            if len(crossing):
                add_lines(*read(crossing[:MAX_READ_BLOCKS].tolist()))
            rest = np.isin(ids, crossing[MAX_READ_BLOCKS:])
            histogram.is_exact = not rest.any()
            for level in np.unique(levels[rest]).tolist():
                of = rest & (levels == level)
                spread = _spread(first[of], last[of], counts[of], num_buckets)
                histogram.levels[level] = histogram.levels.get(level, 0) + spread
        return histogram


def _names(dimension: str, of: Tallies | Lines) -> dict[int, str]:
    """Return what the numbers of a dimension stand for; it may grow."""
    if dimension == "run":
        return of.runs.ids
    return of.runs.projects if dimension == "project" else of.names


def _spread(first: Array, last: Array, counts: Array, num_buckets: int) -> Array:
    """Return the counts of each bucket with each block spread evenly over its own."""
    first, last = np.clip(first, 0, num_buckets - 1), np.clip(last, 0, num_buckets - 1)
    shares = counts / (last - first + 1)
    change = np.bincount(first, shares, num_buckets + 1) - np.bincount(
        last + 1, shares, num_buckets + 1
    )
    so_far = np.round(np.cumsum(np.cumsum(change)[:-1]))
    spread: Array = np.diff(so_far, prepend=0)
    return spread


def _all_but(masks: dict[str, Array], left_out: str) -> Array:
    others = [mask for name, mask in masks.items() if name != left_out]
    mask: Array = np.logical_and.reduce(others) if others else np.array(True)
    return mask
