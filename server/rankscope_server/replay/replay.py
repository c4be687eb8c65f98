"""What-if answers: how long would the steps take if this rank, kind or stage were as it should be?

Ideal durations and the slowdown S are those of ByteDance's straggler analysis (OSDI 2025, arXiv
2505.05713).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rankscope_server.findings.statistics import Array
from rankscope_server.replay.event_graph import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Steps that ran, ready to run again with other durations. All times are ms."""

    graph: Graph
    recorded: Array  # nodes x steps
    kind: Array  # of each node: nodes of one kind should take equally long
    kinds: tuple[str, ...]  # names
    stage: Array  # of each rank
    step_ms: Array  # recorded time of each step
    is_chained: bool = True  # each step begins where the one before ended
    ranks: tuple[int, ...] = ()  # of each row
    steps: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    missing_share: float = 0.0  # of the cells that had to be filled in

    def mean_step_ms(self, durations: Array | None = None) -> float:
        """Return the mean step time with these durations (nodes x steps), else the recorded."""
        durations = self.recorded if durations is None else durations
        if not self.is_chained:
            start = np.zeros((self.graph.num_ranks, durations.shape[1]))
            return float(self.graph.ends(durations, start).max(axis=0).mean())
        ended = self.graph.chain(durations).max(axis=0)
        # How far apart the ranks began is not known: the first step settles it and does not count.
        return float((ended[-1] - ended[0]) / (len(ended) - 1)) if len(ended) > 1 else math.nan

    def recorded_step_ms(self) -> float:
        """Return the mean of the recorded step times that `mean_step_ms` predicts."""
        return float(np.mean(self.step_ms[1:] if self.is_chained else self.step_ms))

    def error_ratio(self) -> float:
        """Return by how much the replay of the recorded durations misses the recorded steps."""
        return self.mean_step_ms() / self.recorded_step_ms() - 1.0

    # --- durations ---------------------------------------------------------------------------

    def ideal(self) -> Array:
        """Return nodes x 1: of each kind the mean of self time, the median of transfers."""
        found = np.zeros((self.graph.num_nodes, 1))
        is_work = self.graph.rank >= 0
        for kind in range(len(self.kinds)):
            nodes = self.kind == kind
            if np.any(nodes & is_work):
                found[nodes & is_work] = np.mean(self.recorded[nodes & is_work])
            if np.any(nodes & ~is_work):
                found[nodes & ~is_work] = np.median(self.recorded[nodes & ~is_work])
        return found

    def of_ranks(self, rows: Sequence[int]) -> Array:
        """Return which nodes are self time of some ranks."""
        found: Array = np.isin(self.graph.rank, np.asarray(rows, np.int64))
        return found

    # --- measures ----------------------------------------------------------------------------

    def slowdown(self) -> float:
        """Return S: the mean step as recorded over the ideal one."""
        return self.mean_step_ms() / self._ideal_step_ms()

    def slowest_ranks(self, share: float = 0.03) -> list[int]:
        """Return the rows with most self time beyond the ideal: a share of all, rounded up."""
        excess = np.sum(self.recorded - self.ideal(), axis=1)
        is_work = self.graph.rank >= 0
        total = np.bincount(
            self.graph.rank[is_work], excess[is_work], minlength=self.graph.num_ranks
        )
        count = math.ceil(share * self.graph.num_ranks)
        return [int(row) for row in np.argsort(-total, kind="stable")[:count]]

    def without_excess(
        self,
        rows: Sequence[int],
        scales: Mapping[int, float] | None = None,
        slower: Mapping[int, float] | None = None,
    ) -> Array:
        """Return the durations with self time of some ranks replaced by the median of their role.

        The role of a rank are the other ranks of its stage that do the same; its nodes are
        compared one by one with theirs in the same step. Self time of a rank without peers is
        multiplied by its factor in `scales`, or stays. Then what is in `slower` works so many times
        as long.
        """
        changed = self.recorded.copy()
        for row in rows:
            mine = self._nodes(row)
            others = np.setdiff1d(np.flatnonzero(self.stage == self.stage[row]), rows)
            theirs = [self._nodes(other) for other in others.tolist()]
            peers = [nodes for nodes in theirs if _same(self.kind[nodes], self.kind[mine])]
            if peers:
                changed[mine] = np.median(self.recorded[np.stack(peers)], axis=0)
            elif scales is not None:
                changed[mine] *= scales.get(row, 1.0)
        for row, factor in (slower or {}).items():
            changed[self._nodes(row)] *= factor
        return changed

    def _nodes(self, row: int) -> Array:
        found: Array = np.flatnonzero(self.graph.rank == row)
        return found

    def step_without_ms(
        self,
        rows: Sequence[int],
        scales: Mapping[int, float] | None = None,
        slower: Mapping[int, float] | None = None,
    ) -> float:
        """Return the mean step if some ranks had worked as their role does; S_r is the ratio."""
        return self.mean_step_ms(self.without_excess(rows, scales, slower))

    def _ideal_step_ms(self) -> float:
        ideal = self.ideal()
        if not self.is_chained:
            return float(self.graph.ends(ideal, np.zeros((self.graph.num_ranks, 1))).max())
        return self.mean_step_ms(np.broadcast_to(ideal, self.recorded.shape))


def _same(one: Array, other: Array) -> bool:
    return len(one) == len(other) and bool(np.all(one == other))
