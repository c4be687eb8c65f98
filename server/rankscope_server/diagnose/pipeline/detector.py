"""Pipelines: how much they idle, why, and what an even split would give."""

from __future__ import annotations

import itertools
from typing import ClassVar

import numpy as np

from rankscope.wire.formulas import throughput_loss
from rankscope_server.diagnose.pipeline.shortcut import bubble_finding, stages_of, uneven_finding
from rankscope_server.diagnose.pipeline.split import Split, best_split, split_of
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import (
    NOT_HERE,
    DetectorResult,
    Finding,
    ran,
    skipped,
)
from rankscope_server.findings.policy import Policy
from rankscope_server.findings.statistics import median
from rankscope_server.findings.text import (
    ms_text,
    percent_text,
    ranks_text,
    ratio_text,
    times_text,
)
from rankscope_server.replay.recorded_program import NoReplay, Program
from rankscope_server.replay.replay import Replay

_PHASES = ("data", "forward", "backward", "optimizer", "other")


class Pipeline:
    """Finds stages that compute longer than the others, and splits what a pipeline idles."""

    name: ClassVar[str] = "pipeline"
    finds: ClassVar[str] = (
        "Stages that compute longer than the others, what a pipeline idles: ideal, imbalance, "
        "transfer, rest, and stages that work one after the other"
    )
    needs: ClassVar[str] = (
        "stages and microbatches, as torch.distributed.pipelining has them, `rankscope.stage()` "
        "says, or [sends and receives show](parallelism.md#stages-of-a-script); collectives of all "
        "ranks for a replay, else self time alone"
    )
    silent: ClassVar[str] = "the stages are even and the microbatches enough"

    def look(self, window: Window) -> DetectorResult:
        """Return the uneven stage, if any; what the pipeline idles is reported as checked."""
        if all(known.num_stages < 2 for known in window.ranks.values()):
            return skipped(self, "no rank owns a stage of a pipeline", NOT_HERE)
        try:
            replay, programs = window.replays.newest(
                window.steps, window.ranks, window.groups, window.policy
            )
        except NoReplay as error:
            return self._without_replay(window, str(error))
        counts = _microbatches(window, replay, programs)
        if counts is None:
            return skipped(
                self, "the number of microbatches is not known", "use torch.distributed.pipelining"
            )
        if replay.stage.max() == 0:
            return skipped(self, "only one stage reports", "attach the agent to all ranks")
        columns = np.searchsorted(window.steps.steps, replay.steps)
        cells = {name: window.steps.get(name)[:, columns].astype(float) for name in _PHASES}
        try:
            split = split_of(replay, cells, *counts)
        except NoReplay as error:
            return skipped(self, str(error), "use one optimizer, or rankscope.phase()")
        stages = stages_of(window, counts[0])
        bubble = None if stages is None or counts[1] > 1 else bubble_finding(window, stages)
        found = () if bubble is None else (bubble,)
        is_even = split.imbalance < window.policy.imbalance_ratio
        if is_even or (stages is not None and stages.is_one_by_one):
            also_lost = _idles(split.bubble, split.schedule, window.policy)
            return ran(self, found, (f"pipeline: {_idle_text(split)}",), also_lost=also_lost)
        steady = _steadiness(replay, cells, split)
        return ran(self, (_finding(window, replay, split, steady), *found))

    def _without_replay(self, window: Window, reason: str) -> DetectorResult:
        """Return what self time alone shows."""
        stages = stages_of(window, 0)
        if stages is None:
            return skipped(self, reason, "record collectives on all ranks, or wait")
        found = (uneven_finding(window, stages), bubble_finding(window, stages))
        findings = [finding for finding in found if finding is not None]
        return ran(
            self, findings, note=f"by self time alone: {reason}",
            also_lost=_idles(stages.idle, stages.schedule, window.policy),
        )  # fmt: skip


def _idles(share: float, schedule: float | None, policy: Policy) -> tuple[str, ...]:
    """Return that a pipeline idles, which its stages do by design, where it is worth a word."""
    if share < policy.cost_info_ratio:
        return ()
    by = "" if schedule is None else f", {percent_text(schedule)} by its schedule"
    return (f"the pipeline idles {percent_text(share)} of the time{by}",)


def _microbatches(
    window: Window, replay: Replay, programs: list[Program]
) -> tuple[int, int] | None:
    """Return microbatches of a step, and chunks of the model that one rank holds.

    Both are what ranks say. Else the first is how often they ran backward; the second follows
    from how often the first stage sends ahead for each.
    """
    said = max((known.num_microbatches for known in window.ranks.values()), default=0)
    held = max((known.num_local_stages for known in window.ranks.values()), default=0)
    if said and held:
        return said, held
    if not said:
        columns = np.searchsorted(window.steps.steps, replay.steps)
        counted = window.steps.get("microbatches")[:, columns]
        said = int(np.nan_to_num(median(median(counted, 1))))
    sends = [
        sum(
            name.shift is not None and name.shift > 0 and word == "send"
            for name, word in zip(program.names, _words(window, program), strict=True)
        )
        for program in programs
        if int(replay.stage[program.rows[0]]) == 0
    ]
    if not sends or not sends[0]:
        return None
    if said < 2:
        return sends[0], 1
    chunks = round(sends[0] / said) if sends[0] % said == 0 else 1
    return said, max(1, chunks)


def _words(window: Window, program: Program) -> list[str]:
    operations = window.replays.events.words("operation")
    return [operations[name.operation] for name in program.names]


def _steadiness(replay: Replay, cells: dict[str, np.ndarray], split: Split) -> float:
    """Return the share of steps in which the slowest stage is the slowest."""
    compute = cells["forward"] + cells["backward"]
    by_stage = np.stack(
        [median(compute[replay.stage == stage], 0) for stage in range(len(split.stage_ms))]
    )
    return float(np.mean(np.argmax(by_stage, axis=0) == split.slowest_stage))


def _finding(window: Window, replay: Replay, split: Split, steady: float) -> Finding:
    stage = split.slowest_stage
    ranks = tuple(replay.ranks[row] for row in np.flatnonzero(replay.stage == stage).tolist())
    cost = throughput_loss(split.step_ms, split.balanced_step_ms)
    is_steady = steady >= window.policy.steady_stage_share
    confidence = 0.6 + 0.2 * is_steady + 0.1 * (abs(replay.error_ratio()) < 0.005)
    enough = split.enough_microbatches()
    return window.finding(
        "stage_imbalance",
        f"stage_imbalance/{stage}",
        ranks=ranks,
        cost=cost,
        what=f"The pipeline idles {percent_text(split.bubble)} of each step, "
        f"{percent_text(split.schedule)} by its schedule and {percent_text(split.imbalance)} by "
        f"stage {stage}",
        why=f"Stage {stage} ({ranks_text(ranks)}) is {ratio_text(split.slowest_ratio)} slower than "
        f"the mean of the others: {ms_text(split.stage_ms[stage])} a step, the others "
        f"{', '.join(ms_text(ms) for s, ms in enumerate(split.stage_ms) if s != stage)}",
        next=_advice(window, split),
        confidence=(
            round(confidence, 2),
            f"stage {stage} is the slowest in {percent_text(steady)} of {len(replay.steps)} "
            "steps, and a replay gives back their times within "
            f"{100 * abs(replay.error_ratio()):.1f} %",
        ),
        evidence=(
            _idle_text(split),
            f"Replay with all stages at their mean: {ms_text(split.balanced_step_ms)} a step "
            f"in place of {ms_text(split.step_ms)}",
            f"{enough} microbatches or more bring the schedule's share to "
            f"{percent_text(window.policy.bubble_goal)}: "
            f"{percent_text(split.gain_of_microbatches(enough))} more throughput at the same "
            "batch, less what smaller microbatches lose in the kernels; they hold no more "
            "activations"
            if enough > split.num_microbatches
            else f"{split.num_microbatches} microbatches are enough",
        ),
        ruled_out=(
            "One slow rank: the stage's median over its replicas counts"
            if len(ranks) > 1
            else "The schedule: its share is that of even stages",
            f"Transfers between stages: without them {percent_text(split.transfer)} of the span "
            "would be saved",
        ),
        disproof=f"Stage {stage} became slow at some step while its work stayed the same: "
        "then it is a slow rank, not an uneven split",
    )


def _advice(window: Window, split: Split) -> str:
    stage, mean = split.slowest_stage, float(np.mean(split.stage_ms))
    excess = split.stage_ms[stage] - mean
    gain = f"the replay predicts up to {percent_text(split.gain)} more throughput"
    layers = window.layer_ms
    sizes = best_split(layers, split.num_stages) if layers else None
    if sizes is not None:
        ends = itertools.accumulate(sizes)
        slowest = max(sum(layers[end - size : end]) for size, end in zip(sizes, ends, strict=True))
        reached = slowest / (sum(layers) / split.num_stages)
        return (
            f"Give the stages {', '.join(str(size) for size in sizes)} layers; the slowest stage "
            f"is then {times_text(reached)} the mean, and {gain}"
        )
    least = int(np.argmin(split.stage_ms))
    return (
        f"Move layers that take {ms_text(excess)} a step, {percent_text(excess / (mean + excess))} "
        f"of stage {stage}, to other stages, first to stage {least}; {gain}"
    )


def _idle_text(split: Split) -> str:
    return (
        f"idle {percent_text(split.bubble)} of the span of {ms_text(split.span_ms)}: schedule "
        f"{percent_text(split.schedule)} ({split.num_stages} stages, {split.num_microbatches} "
        f"microbatches), imbalance {percent_text(split.imbalance)}, transfers "
        f"{percent_text(split.transfer)}, rest {percent_text(split.rest)}"
    )
