"""How much a pipeline idles beside what its schedule must, and how long each stage works. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rankscope_server.api.parallelism.schema import Pipeline, PipelineStage
from rankscope_server.api.steps.queries import known
from rankscope_server.diagnose.pipeline.shortcut import Stages, stages_over
from rankscope_server.findings.policy import POLICY
from rankscope_server.findings.statistics import Array, median
from rankscope_server.findings.text import ranks_text

# Schedules of torch.distributed.pipelining that flush, by name without "Schedule", and whether a
# rank may hold several stages. What idles in the others depends on the order that they choose.
_FLUSHED = {"": False, "gpipe": False, "1f1b": False, "interleaved1f1b": True, "loopedbfs": True}
_DIVIDED = "(p \N{MINUS SIGN} 1) / (m + p \N{MINUS SIGN} 1)"
_CHUNKED = "(p \N{MINUS SIGN} 1) / (v m + p \N{MINUS SIGN} 1)"


def pipeline_over(
    planes: Mapping[str, Array],
    stage_of: Mapping[int, int],
    said: tuple[int, int, str],
    steps: tuple[int, int],
) -> Pipeline | None:
    """Return the pipeline of some ranks; None where fewer than two places are known.

    `planes` are "own", "duration", "forward", "backward" (self time, ms) and "microbatches", ranks
    x steps. `said` is what ranks say: stages of the model, microbatches, schedule.
    """
    ranks = range(len(planes["own"]))
    places = sorted({stage for stage in stage_of.values() if stage >= 0})
    if len(places) < 2:
        return None
    num_stages, microbatches, schedule = said
    chunks = max(1, num_stages // len(places))  # of a place that no rank reports, fewer
    found = stages_over(planes, ranks, stage_of, microbatches, POLICY, chunks)
    count = found.microbatches if found is not None else microbatches
    ideal, text = ideal_of(schedule, len(places), count, chunks)
    return Pipeline(
        num_stages=max(num_stages, len(places)),
        num_ranks=len(places),
        num_chunks=chunks,
        num_microbatches=count or None,
        schedule=schedule,
        step_lo=steps[0],
        step_hi=steps[1],
        step_ms=None if found is None else found.step_ms,
        idle_ratio=None if found is None else found.idle,
        ideal_ratio=ideal,
        ideal_text=text,
        even_gain=None if found is None or found.is_one_by_one else found.even_gain,
        stages=[
            _stage(planes, place, at, [rank for rank in ranks if stage_of.get(rank) == place],
                   found, count)
            for at, place in enumerate(places)
        ],
    )  # fmt: skip


def ideal_of(
    schedule: str, num_ranks: int, microbatches: int, chunks: int
) -> tuple[float | None, str]:
    """Return the share that a schedule idles with even stages, and its formula or why none."""
    key = schedule.lower().removeprefix("schedule")
    if key not in _FLUSHED or (chunks > 1 and not _FLUSHED[key]):
        return None, f"no formula is known for {schedule or 'several stages on a rank'}"
    if not microbatches:
        return None, "the number of microbatches is not known"
    none = np.empty((num_ranks, 0))
    share = Stages(
        tuple((rank,) for rank in range(num_ranks)), none, none, 0.0, microbatches, chunks
    )
    numbers = f"p = {num_ranks} ranks, m = {microbatches} microbatches"
    if chunks > 1:
        return share.schedule, f"{_CHUNKED}, {numbers}, v = {chunks} stages on each"
    return share.schedule, f"{_DIVIDED}, {numbers}"


def _stage(
    planes: Mapping[str, Array], place: int, at: int, members: Sequence[int],
    stages: Stages | None, microbatches: int,
) -> PipelineStage:  # fmt: skip
    """Return one place of the pipeline; `at` is its row among the stages."""
    each = median(planes["own"][members], 1)  # of each rank
    own = None if stages is None else float(stages.usual_ms[at])
    others = None if stages is None else float(np.mean(np.delete(stages.usual_ms, at)))
    has_longest = len(members) > 1 and not np.isnan(each).all()
    longest = int(np.nanargmax(each)) if has_longest else None
    middle = float(median(each[None], 1)[0])
    return PipelineStage(
        stage=place,
        num_ranks=len(members),
        ranks_text=ranks_text(members) if members else "no rank",
        own_ms=own,
        forward_ms=_of_each(planes["forward"][members], microbatches),
        backward_ms=_of_each(planes["backward"][members], microbatches),
        idle_ratio=None if stages is None or own is None else max(0.0, 1.0 - own / stages.step_ms),
        others_ratio=own / others if own is not None and others else None,
        longest_rank=None if longest is None else members[longest],
        longest_ratio=None if longest is None or not middle else float(each[longest]) / middle,
    )


def _of_each(cells: Array, microbatches: int) -> float | None:
    """Return the usual ms of one microbatch."""
    usual = known(median(median(cells, 0)[None], 1)[0])
    return usual / microbatches if usual is not None and microbatches else None
