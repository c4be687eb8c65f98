"""What a pipeline idles and which stage is uneven, where its steps cannot be replayed.

Self time of the stages is taken for their compute, and the schedule's idle share is that of even
stages. Transfers and overlap are not seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rankscope.wire.formulas import bubble_fraction
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import Finding
from rankscope_server.findings.policy import POLICY, Policy
from rankscope_server.findings.statistics import Array, median
from rankscope_server.findings.text import (
    ms_text,
    percent_text,
    ranks_text,
    ratio_text,
)
from rankscope_server.observe.deviation import usual_steps

_MORE = (4, 8)  # microbatches of which is said what they would give


CELLS = ("own", "duration", "forward", "backward", "microbatches")


@dataclass(frozen=True, slots=True)
class Stages:
    """Self time of each stage, ms a step, over the newest steps."""

    ranks: tuple[tuple[int, ...], ...]  # by stage
    own_ms: Array  # stages x steps
    work_ms: Array  # forward and backward alone, NaN where they are not known
    step_ms: float
    microbatches: int  # 0: not known
    chunks: int = 1  # of the model, on each rank
    passes: int = 0  # backward passes of a step, as they were counted; 0: not known

    @property
    def usual_ms(self) -> Array:
        """Return the median of each stage."""
        return median(self.own_ms)

    @property
    def idle(self) -> float:
        """Return the share of the step in which the mean stage does not work."""
        return max(0.0, 1.0 - float(np.mean(self.usual_ms)) / self.step_ms)

    @property
    def is_flushed(self) -> bool:
        """Return whether stages idle what a schedule must that ends with each step.

        Others overlap steps: they idle less.
        """
        if self.schedule is None:
            return False
        work_ms = median(self.work_ms)
        known = self.usual_ms if np.isnan(work_ms).any() else work_ms
        idle = 1.0 - float(np.mean(known)) / self.step_ms
        return idle >= POLICY.schedule_share * self.schedule

    @property
    def is_one_by_one(self) -> bool:
        """Return whether only one stage works at any time."""
        return self.microbatches == 1 and self.chunks == 1 and self.is_flushed

    @property
    def schedule(self) -> float | None:
        """Return the idle share of even stages; None where the microbatches are not known."""
        if not self.microbatches:
            return None
        return bubble_fraction(len(self.ranks), self.microbatches, self.chunks)

    @property
    def slowest(self) -> int:
        """Return the place of the stage that works longest."""
        return int(np.argmax(self.usual_ms))

    @property
    def slowest_ratio(self) -> float:
        """Return how long it works, the mean of the others being 1."""
        others = float(np.mean(np.delete(self.usual_ms, self.slowest)))
        return float(self.usual_ms[self.slowest]) / others if others > 0 else 1.0

    @property
    def even_gain(self) -> float:
        """Return the share of each step that even stages would save at most.

        A step of even stages is their work and the schedule's idle time, (p - 1) / (v m) of the
        work: what fills and drains around a slow first stage is shorter than around even ones.
        """
        mean_ms = float(np.mean(self.usual_ms))
        saved_ms = float(np.max(self.usual_ms)) - mean_ms
        if self.microbatches and self.is_flushed:
            fill = (len(self.ranks) - 1) / (self.chunks * self.microbatches)
            saved_ms = min(saved_ms, self.step_ms - mean_ms - fill * self.mean_work_ms)
        return max(0.0, saved_ms) / self.step_ms

    @property
    def mean_work_ms(self) -> float:
        """Return how long the mean stage runs forward and backward; all self time if not known."""
        work_ms = median(self.work_ms)
        return float(np.mean(self.usual_ms if np.isnan(work_ms).any() else work_ms))


def stages_of(window: Window, microbatches: int) -> Stages | None:
    """Return the stages over the newest steps; None for too few of them."""
    table, policy = window.steps, window.policy
    columns = np.flatnonzero(usual_steps(table, policy))[-policy.stall_steps :]
    if len(columns) < policy.stage_steps:
        return None
    known = {rank: row.stage for rank, row in window.ranks.items() if row.num_stages > 1}
    said = max((row.num_microbatches for row in window.ranks.values()), default=0)
    cells = {name: table.get(name)[:, columns] for name in CELLS}
    return stages_over(cells, table.ranks, known, microbatches or said, policy)


def stages_over(
    cells: Mapping[str, Array],
    ranks: Sequence[int],
    stage_of: Mapping[int, int],
    microbatches: int,
    policy: Policy,
    chunks: int = 1,
) -> Stages | None:
    """Return the stages over some steps; None where one of them is not known.

    `cells` are `CELLS`, in ms but for "microbatches", a row for each of `ranks`, a column for each
    step. Microbatches that are not said (0) are those that were counted.
    """
    row_of = {rank: row for row, rank in enumerate(ranks)}
    stages = sorted({stage for stage in stage_of.values() if stage >= 0})
    if len(stages) < 2:
        return None
    found, own, work = [], [], []
    for stage in stages:
        members = tuple(rank for rank in ranks if stage_of.get(rank) == stage)
        if not members:
            return None
        found.append(members)
        rows = [row_of[rank] for rank in members]
        own.append(median(cells["own"][rows], 0))
        work.append(median(cells["forward"][rows] + cells["backward"][rows], 0))
        if float(np.mean(np.isnan(own[-1]))) > policy.max_missing_share:
            return None
    passes = int(np.nan_to_num(median(median(cells["microbatches"], 1))))
    count = microbatches or passes
    step_ms = float(np.nanmedian(median(cells["duration"], 0)))
    return Stages(tuple(found), np.stack(own), np.stack(work), step_ms, count, chunks, passes)


def uneven_finding(window: Window, stages: Stages) -> Finding | None:
    """Return the finding on a stage that works more than a tenth longer than the others."""
    usual, policy, stage = stages.usual_ms, window.policy, stages.slowest
    others, ratio = np.delete(usual, stage), stages.slowest_ratio
    steady = float(np.mean(np.nanargmax(np.nan_to_num(stages.own_ms), axis=0) == stage))
    is_clear = ratio >= policy.uneven_stage_ratio and steady >= policy.steady_stage_share
    if stages.own_ms.shape[1] < policy.min_steps or not is_clear or stages.is_one_by_one:
        return None  # one by one they take as long however the layers are split
    cost, ranks = stages.even_gain, stages.ranks[stage]
    confidence = 0.6
    beside = f"stage {1 - stage}" if len(usual) == 2 else "the others"
    return window.finding(
        "stage_imbalance",
        f"stage_imbalance/{stage}",
        cost=cost,
        what=f"Stage {stage} of the pipeline is {ratio_text(ratio)} slower than {beside}",
        why=f"Stage {stage} ({ranks_text(ranks)}) works {ms_text(float(usual[stage]))} a step, the "
        f"other{'s' * (len(others) > 1)} {', '.join(ms_text(float(ms)) for ms in others)}; even "
        f"stages would save up to {percent_text(cost)} of each step (by self time: the steps could "
        "not be replayed)",
        next=f"Move layers from stage {stage} to stage {int(np.argmin(usual))}; time the layers "
        "first: log_metrics(step, layer_ms_0=...) lets Rankscope say how many",
        confidence=(
            confidence,
            f"stage {stage} is the slowest in "
            f"{percent_text(steady)} of the steps; what transfers hide is not known",
        ),
        evidence=(_idle_text(stages),),
        ruled_out=("The schedule: even stages would wait for it as long as these do",),
        disproof=f"Stage {stage} holds as many layers as the others: then its rank is "
        "slow, and was so from the first step on",
    )


def bubble_finding(window: Window, stages: Stages) -> Finding | None:
    """Return the advice on a pipeline that idles by its schedule, None where it is small."""
    schedule, policy = stages.schedule, window.policy
    if schedule is None or schedule < policy.bubble_share or not stages.is_flushed:
        return None  # flushed: it idles what its schedule says, or nearly so
    if stages.is_one_by_one:
        return _one_by_one_finding(window, stages)
    count, extra = stages.microbatches, len(stages.ranks) - 1
    enough = math.ceil(round(extra * (1 - policy.bubble_goal) / policy.bubble_goal, 6))
    # At the same batch stages work as long, and idle (p - 1) / m of that to fill and to drain.
    cost = extra * (1 / count - 1 / enough) * stages.mean_work_ms / stages.step_ms
    confidence = 0.7
    return window.finding(
        "pipeline_bubble",
        "pipeline_bubble",
        cost=cost,
        what=f"The pipeline idles {percent_text(stages.idle)} of each step, "
        f"{percent_text(schedule)} by its schedule: {count} microbatches are few for "
        f"{extra + 1} stages",
        why=f"A stage waits while the pipeline fills and drains, ({extra + 1} - 1) / ({count} + "
        f"{extra + 1} - 1) of the time; measured: the mean stage works "
        f"{ms_text(float(np.mean(stages.usual_ms)))} of a step of {ms_text(stages.step_ms)}",
        next=f"Cut the batch into {enough} microbatches or more, or interleave several chunks of "
        f"the model on each stage; up to {percent_text(cost)} of the time is to be had, less what "
        "smaller microbatches lose in the kernels",
        confidence=(confidence, "the schedule's share is a formula, idle time is measured"),
        evidence=(_idle_text(stages),),
        disproof="The schedule overlaps steps, as asynchronous pipelines do",
    )


def _one_by_one_finding(window: Window, stages: Stages) -> Finding:
    """Return the advice on a model whose stages wait for each other: no pipeline at all."""
    count, own_ms = len(stages.ranks), float(np.mean(stages.usual_ms))
    passes = stages.passes
    how = "1 microbatch" if passes < 2 else f"{passes} microbatches, each alone in the pipeline"
    idles = [percent_text(bubble_fraction(count, number)) for number in _MORE]
    reached = [ms_text(own_ms * (number + count - 1) / number) for number in _MORE]
    return window.finding(
        "no_pipelining",
        "no_pipelining",
        cost=stages.idle,
        what=f"{count} stages work one after the other ({how}): a stage idles "
        f"{percent_text(stages.idle)} of each step",
        why=f"Only one stage has something to do at any time: (p - 1) / (m + p - 1) = "
        f"({count} - 1) / (1 + {count} - 1) = {percent_text(stages.schedule or 0.0)} of the time "
        f"is idle; measured: the mean stage works {ms_text(own_ms)} of a step of "
        f"{ms_text(stages.step_ms)}",
        next=f"Cut the batch into microbatches that are in the pipeline at once, for example with "
        f"torch.distributed.pipelining: {_MORE[0]} would idle {idles[0]} of a step, {_MORE[1]} "
        f"{idles[1]}, and the step take {reached[0]} and {reached[1]} at the same batch, less what "
        "smaller microbatches lose in the kernels",
        confidence=(0.8, "idle time is measured, what it comes from follows from the exchanges"),
        evidence=(_idle_text(stages), _order_text(stages)),
        ruled_out=(
            "Uneven stages: one by one they take as long however the layers are split",
            *_network_text(stages),
        ),
        disproof="The ranks take turns on purpose, as each needs the whole result of the one "
        "before: then there is nothing to cut",
    )


def _network_text(stages: Stages) -> tuple[str, ...]:
    """Return that transfers are not what is waited for, where the work of all fills the step."""
    share = float(np.sum(stages.usual_ms)) / stages.step_ms
    if share < POLICY.schedule_share:
        return ()
    return (f"The network: the work of all stages together fills {percent_text(min(share, 1.0))} "
            "of the step",)  # fmt: skip


def _order_text(stages: Stages) -> str:
    """Return the stages in their order, of few of them."""
    shown = [ranks_text(ranks) for ranks in stages.ranks[:8]]
    more = "" if len(stages.ranks) <= len(shown) else f" and {len(stages.ranks) - len(shown)} more"
    return f"Stages in their order: {', then '.join(shown)}{more}"


def _idle_text(stages: Stages) -> str:
    schedule, count = stages.schedule, stages.microbatches
    share = "not known" if schedule is None else percent_text(schedule)
    microbatches = f"{count or 'unknown'} microbatch{'es' * (count != 1)}"
    return (
        f"idle {percent_text(stages.idle)} of a step of {ms_text(stages.step_ms)}; by the schedule "
        f"{share} ({len(stages.ranks)} stages, {microbatches})"
    )
