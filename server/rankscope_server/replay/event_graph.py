"""One step of all ranks as a graph of self time and transfers, and the time at which it ends.

Nodes are stretches of a rank's self time, and transfers: collectives and exchanges. A rank does its
work in program order; a transfer begins when the last member has issued it; a rank that joins a
transfer continues when it has ended. A node ends at the latest end of what it
follows plus its own duration, so a replay is one pass over the nodes in topological order, for
many columns (steps, or variants of one) at once.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from rankscope_server.findings.statistics import Array


class CycleError(ValueError):
    """The operations wait for each other in a circle: the model of who waits for whom is wrong."""


@dataclass(frozen=True, slots=True)
class Level:
    """Nodes that follow only nodes of earlier levels. Slot r is the start of rank r."""

    slots: Array  # of the nodes
    nodes: Array
    sources: Array  # slots, those of one node together
    begins: Array  # where the sources of each node begin


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes of one step; `rank` is the row of the rank that works, -1 for a transfer."""

    num_ranks: int
    rank: Array  # nodes
    levels: tuple[Level, ...]
    last: Array  # slot at which each rank ends its step

    @property
    def num_nodes(self) -> int:
        """Return how many nodes there are."""
        return len(self.rank)

    def times(self, durations: Array, start: Array) -> Array:
        """Return when each node ends, after the starts of the ranks: slots x columns.

        `durations` is nodes x columns, `start` ranks x columns, both in the same unit; without
        columns, both are vectors.
        """
        times = np.empty((self.num_ranks + self.num_nodes, *durations.shape[1:]))
        times[: self.num_ranks] = start
        for level in self.levels:
            latest = np.maximum.reduceat(times[level.sources], level.begins, axis=0)
            times[level.slots] = latest + durations[level.nodes]
        return times

    def ends(self, durations: Array, start: Array) -> Array:
        """Return when each rank ends, ranks x columns."""
        ended: Array = self.times(durations, start)[self.last]
        return ended

    def chain(self, durations: Array) -> Array:
        """Return when each rank ends each step (ranks x steps) where steps follow each other."""
        now = np.zeros(self.num_ranks)
        found = np.empty((self.num_ranks, durations.shape[1]))
        for column in range(durations.shape[1]):
            now = found[:, column] = self.ends(durations[:, column], now)
        return found


class GraphBuilder:
    """Takes what each rank does in program order; ranks may be given one after the other."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._rank: list[int] = []
        self._edges: list[tuple[int, int]] = []  # source slot, node
        self._last = list(range(num_ranks))  # slot where the rank is now
        self._joined: list[list[Hashable]] = [[] for _ in range(num_ranks)]
        self._transfers: dict[Hashable, int] = {}

    def work(self, rank: int) -> int:
        """Return the node of a stretch of self time that comes next on a rank."""
        node = self._node(rank)
        self._edges.append((self._last[rank], node))
        self._edges += [(self._slot(key), node) for key in self._joined[rank]]
        self._joined[rank] = []
        self._last[rank] = self._num_ranks + node
        return node

    def issue(self, rank: int, transfer: Hashable) -> None:
        """Say that a transfer cannot begin before this point of a rank."""
        if self._joined[rank]:
            self.work(rank)
        self._edges.append((self._last[rank], self._transfer(transfer)))

    def join(self, rank: int, transfer: Hashable) -> None:
        """Say that a rank cannot go on before a transfer has ended."""
        self._transfer(transfer)
        self._joined[rank].append(transfer)

    def follow(self, transfer: Hashable, earlier: Hashable) -> None:
        """Say that a transfer cannot begin before another has ended."""
        self._edges.append((self._slot(earlier), self._transfer(transfer)))

    @property
    def transfers(self) -> dict[Hashable, int]:
        """Return the node of each transfer."""
        return self._transfers

    def build(self) -> Graph:
        """Return the graph. Raises CycleError."""
        for rank in range(self._num_ranks):
            if self._joined[rank]:
                self.work(rank)
        edges = np.array(self._edges, np.int64).reshape(-1, 2)
        codes = np.unique(edges[:, 1] << 32 | edges[:, 0])  # each once, by node
        edges = np.stack([codes & 0xFFFFFFFF, codes >> 32], axis=1)
        return Graph(
            self._num_ranks,
            np.array(self._rank, np.int64),
            _levels(self._num_ranks, len(self._rank), edges),
            np.array(self._last, np.int64),
        )

    def _node(self, rank: int) -> int:
        self._rank.append(rank)
        return len(self._rank) - 1

    def _transfer(self, key: Hashable) -> int:
        node = self._transfers.get(key)
        if node is None:
            node = self._transfers[key] = self._node(-1)
        return node

    def _slot(self, key: Hashable) -> int:
        return self._num_ranks + self._transfer(key)


def _levels(num_ranks: int, num_nodes: int, edges: Array) -> tuple[Level, ...]:
    """Return the nodes by the length of the longest way to them (Kahn 1962).

    `edges` are source slots and nodes, in order of the nodes.
    """
    sources, targets = edges[:, 0], edges[:, 1]
    first = np.searchsorted(targets, np.arange(num_nodes + 1))
    by_source = np.argsort(sources, kind="stable")
    out_first = np.searchsorted(sources[by_source], np.arange(num_ranks + num_nodes + 1))
    waits = np.diff(first)
    levels: list[Level] = []
    ready, num_done = np.arange(num_ranks), 0
    while len(ready):
        after = targets[by_source[_ranges(out_first[ready], out_first[ready + 1])]]
        np.subtract.at(waits, after, 1)
        nodes = np.unique(after[waits[after] == 0])
        if len(nodes):
            counts = first[nodes + 1] - first[nodes]
            taken = sources[_ranges(first[nodes], first[nodes + 1])]
            begins = np.concatenate([[0], np.cumsum(counts)[:-1]])
            levels.append(Level(num_ranks + nodes, nodes, taken, begins))
        num_done += len(nodes)
        ready = num_ranks + nodes
    if num_done < num_nodes:
        raise CycleError(f"{num_nodes - num_done} operations wait for each other in a circle")
    return tuple(levels)


def _ranges(begins: Array, ends: Array) -> Array:
    """Return the numbers of all ranges, one after the other."""
    counts = ends - begins
    shift = np.repeat(begins - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
    found: Array = np.arange(int(counts.sum())) + shift
    return found
