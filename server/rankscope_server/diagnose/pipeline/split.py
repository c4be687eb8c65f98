"""Where a pipeline's idle time goes: schedule, imbalance, transfers and the rest.

Self time of stages and spans are means over ranks, because one rank's timers can fall below the
ideal. Each part is the difference of two replays, so the parts add up to the whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rankscope_server.findings.policy import POLICY
from rankscope_server.findings.statistics import Array, median
from rankscope_server.replay.recorded_program import NoReplay
from rankscope_server.replay.replay import Replay


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Shares are of the span: the step without optimizer and collectives. Times are ms."""

    num_stages: int
    num_microbatches: int
    num_chunks: int  # stages that one rank holds
    step_ms: float
    span_ms: float
    bubble: float
    schedule: float
    imbalance: float
    transfer: float
    stage_ms: tuple[float, ...]  # own forward and backward per step, median of its ranks
    balanced_step_ms: float  # replay with all stages at their mean

    @property
    def rest(self) -> float:
        """Return what no part explains: uneven microbatches, slow single ranks, launches."""
        return self.bubble - self.schedule - self.imbalance - self.transfer

    @property
    def slowest_stage(self) -> int:
        """Return the stage that computes longest."""
        return int(np.argmax(self.stage_ms))

    @property
    def slowest_ratio(self) -> float:
        """Return by how much the slowest stage computes longer than the mean of the others."""
        others = [ms for stage, ms in enumerate(self.stage_ms) if stage != self.slowest_stage]
        return max(self.stage_ms) / float(np.mean(others))

    @property
    def gain(self) -> float:
        """Return how much more throughput even stages would give."""
        return self.step_ms / self.balanced_step_ms - 1.0

    def enough_microbatches(self) -> int:
        """Return the least number for which the schedule idles at most so much as is aimed at.

        It idles (p - 1) / (v m + p - 1).
        """
        goal = POLICY.bubble_goal
        wanted = (self.num_stages - 1) * (1 - goal) / goal / self.num_chunks
        return math.ceil(round(wanted, 6))

    def gain_of_microbatches(self, number: int) -> float:
        """Return the gain of more microbatches at the same global batch, schedule only."""
        saved = self.schedule * self.span_ms * (1 - self.num_microbatches / number)
        return self.step_ms / (self.step_ms - saved) - 1.0


def split_of(
    replay: Replay,
    cells: Mapping[str, Array],
    num_microbatches: int,
    num_chunks: int,
) -> Split:
    """Return the split. `cells` are "data", "forward", "backward", "optimizer", "other": self time.

    Ranks x steps in ms, rows and columns those of the replay. Raises NoReplay.
    """
    num_stages = int(replay.stage.max()) + 1
    own = cells["forward"] + cells["backward"]
    compute = np.nansum(own, axis=1) / np.maximum(np.sum(~np.isnan(own), axis=1), 1)
    if not np.all(compute > 0):
        raise NoReplay("forward and backward of some ranks are not known")
    stage_ms = np.array([median(compute[replay.stage == s]) for s in range(num_stages)])
    step = replay.mean_step_ms()
    collectives = _transfers(replay, exchanges=False)
    without = replay.mean_step_ms(np.where(collectives, 0.0, replay.recorded))
    span, mean = without - float(np.nanmean(cells["optimizer"])), float(stage_ms.mean())
    level = stage_ms[replay.stage] / compute  # every rank as the median of its stage
    fixed = _fixed(replay, cells)
    even = _scaled(replay, mean / compute, fixed)
    levelled = replay.mean_step_ms(_scaled(replay, level, fixed))
    balanced = replay.mean_step_ms(even)
    at_once = replay.mean_step_ms(np.where(_transfers(replay, exchanges=True), 0.0, even))
    return Split(
        num_stages=num_stages * num_chunks,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        step_ms=step,
        span_ms=span,
        bubble=float(np.mean(1.0 - compute / span)),
        schedule=(num_stages - 1) / (num_chunks * num_microbatches) * mean / span,
        imbalance=(levelled - balanced) / span,
        transfer=(balanced - at_once) / span,
        stage_ms=tuple(float(ms) for ms in stage_ms),
        balanced_step_ms=step - (levelled - balanced),
    )


def _transfers(replay: Replay, *, exchanges: bool) -> Array:
    """Return which nodes are exchanges between stages, or else collectives (nodes x 1)."""
    named = np.array([kind.startswith("exchange") for kind in replay.kinds])[replay.kind]
    found: Array = ((named == exchanges) & (replay.graph.rank < 0))[:, None]
    return found


def _fixed(replay: Replay, cells: Mapping[str, Array]) -> Array:
    """Return the part of each node that is not forward or backward, nodes x steps."""
    fixed = np.zeros_like(replay.recorded)
    for row in range(replay.graph.num_ranks):
        nodes = np.flatnonzero(replay.graph.rank == row)
        first, last = nodes[0], nodes[-1]
        fixed[first] += np.nan_to_num(cells["data"][row])
        fixed[last] += np.nan_to_num(cells["optimizer"][row] + cells["other"][row])
    return np.minimum(fixed, replay.recorded)


def _scaled(replay: Replay, factor: Array, fixed: Array) -> Array:
    """Return the durations with forward and backward of each rank multiplied."""
    is_work = replay.graph.rank >= 0
    by_node = np.where(is_work, factor[replay.graph.rank], 1.0)[:, None]
    scaled: Array = (replay.recorded - fixed) * by_node + fixed
    return scaled


def best_split(
    layer_ms: Sequence[float],
    num_stages: int,
    *,
    layer_bytes: Sequence[float] = (),
    stage_limit_bytes: float = float("inf"),
) -> tuple[int, ...] | None:
    """Return how many layers each stage takes so that the slowest stage is as fast as can be.

    Dynamic programme over prefixes: the best slowest stage of the first i layers in k stages is
    the least over j of max(best of the first j in k - 1, layers j to i). Layers keep their order,
    so the first (embedding) stays on the first stage and the last (loss) on the last. Every stage
    takes at least one. None where no split keeps every stage below `stage_limit_bytes`.
    """
    count = len(layer_ms)
    if not 1 <= num_stages <= count:
        return None
    times = np.concatenate([[0.0], np.cumsum(layer_ms)])
    sizes = np.concatenate([[0.0], np.cumsum(layer_bytes or np.zeros(count))])
    best = np.full((num_stages + 1, count + 1), np.inf)
    cut = np.zeros((num_stages + 1, count + 1), np.int64)
    best[0, 0] = 0.0
    for stage in range(1, num_stages + 1):
        for stop in range(stage, count + 1):
            begins = np.arange(stage - 1, stop)
            fits = sizes[stop] - sizes[begins] <= stage_limit_bytes
            slowest = np.maximum(best[stage - 1, begins], times[stop] - times[begins])
            slowest = np.where(fits, slowest, np.inf)
            cut[stage, stop] = begins[np.argmin(slowest)]
            best[stage, stop] = slowest.min()
    if not np.isfinite(best[num_stages, count]):
        return None
    bounds = [count]
    for stage in range(num_stages, 0, -1):
        bounds.append(int(cut[stage, bounds[-1]]))
    return tuple(int(size) for size in np.diff(bounds[::-1]))
