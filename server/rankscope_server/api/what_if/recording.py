"""Reads from the store what a run shows of its layout, its steps and its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope.wire.schema import STEP_CHECKPOINT, STEP_EVALUATION, STEP_FIRST
from rankscope_server.api.communication.calls import meetings
from rankscope_server.api.communication.queries import MAX_CALLS, calls_of
from rankscope_server.api.groups.mesh import Family, families_of, layout_of
from rankscope_server.api.groups.stored import groups_of
from rankscope_server.api.ranks.chunks import Wanted, choose
from rankscope_server.api.runs.environment import facts_of
from rankscope_server.api.runs.queries import RANK_HEAD, onset_step, rank_rows
from rankscope_server.api.steps.queries import (
    RECENT_STEPS,
    Array,
    first_step,
    load_range,
    quiet,
    steps_of_many,
    typical_range,
    waiting_planes,
)
from rankscope_server.findings.statistics import median
from rankscope_server.ingest.step_metrics import BLOCKED_METRICS, PHASE_METRICS
from rankscope_server.store import tables
from rankscope_server.verdict.budget import split
from rankscope_server.what_if.recorded import Recorded, Sent, sent_of

_METRICS = ("step", "blocked", "cpu", "num_collectives", "microbatches", "flags", *PHASE_METRICS,
            *BLOCKED_METRICS)  # fmt: skip
_SPECIAL = STEP_FIRST | STEP_CHECKPOINT | STEP_EVALUATION
_CONSTANTS = ("parameters", "parameter_bytes", "optimizer_state_bytes", "model_layers",
              "layer_parameters")  # fmt: skip
_PEAKS = ("cuda_peak_bytes", "rss_peak_bytes")
_FIRST_STEPS = 16  # of a process, in which it says what does not change
_PEAK_STEPS = 2_000  # in which some sample of memory is: of each rank one a second
_MAX_RANKS = 4_096  # whose numbers are looked at
# As the planner calls what torch.distributed.pipelining calls Schedule...
_SCHEDULES = {
    "gpipe": "gpipe", "1f1b": "1f1b", "interleaved1f1b": "interleaved",
    "loopedbfs": "interleaved", "interleavedzerobubble": "zero_bubble",
    "zbvzerobubble": "zero_bubble_v",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Steps:
    """Means over ranks of the middle half of the ordinary steps."""

    first: int
    last: int
    num_steps: int
    step_ms: float
    parts: dict[str, float]
    computing_ms: Array  # of each rank: forward and backward
    microbatches: int
    processor_share: float


def recorded_of(connection: sa.Connection, run: sa.Row[Any]) -> Recorded:
    """Return what is known of the newest attempt of a run."""
    rows = rank_rows(
        connection, run.run_id, run.attempt,
        (*RANK_HEAD, "num_stages", "num_microbatches", "schedule"),
    )  # fmt: skip
    world_size = max([run.world_size, *(row.rank + 1 for row in rows)])
    stage_of = {row.rank: row.stage for row in rows if row.num_stages > 1}
    families = families_of(groups_of(connection, run), world_size, stage_of)
    places = len({stage for stage in stage_of.values() if stage >= 0})
    steps = _steps(connection, run, world_size, {row.rank: row.stage for row in rows})
    numbers = _numbers(connection, run, steps.last)
    said = max(((row.num_stages, row.num_microbatches, row.schedule) for row in rows),
               default=(0, 0, ""))  # fmt: skip
    schedule = said[2].lower().removeprefix("schedule")
    is_cuda = "cuda_peak_bytes" in numbers
    facts = facts_of(connection, run.run_id, run.attempt, 0).get(0, {})
    return Recorded(
        ranks=world_size,
        nodes=len({row.host for row in rows if row.host}) or 1,
        step_lo=steps.first, step_hi=steps.last, num_steps=steps.num_steps,
        step_ms=steps.step_ms, parts=steps.parts,
        stages=max(places, 1),
        chunks=max(1, said[0] // places) if places else 1,
        schedule=_SCHEDULES.get(schedule, "") if places else "",
        stage_ms=_slowest_stage(steps.computing_ms, stage_of) if places > 1 else 0.0,
        why_no_layout=_why_no_layout(families, world_size, places, stage_of),
        sent=() if places > 1 else _sent(
            connection, run, families, world_size, (steps.first, steps.last)
        ),
        microbatches=said[1] if places else steps.microbatches,
        parameters=numbers.get("parameters", 0.0),
        parameter_bytes=numbers.get("parameter_bytes", 0.0),
        optimizer_bytes=numbers.get("optimizer_state_bytes", 0.0),
        layers=int(numbers.get("model_layers", 0)),
        layer_parameters=numbers.get("layer_parameters", 0.0),
        memory_bytes=numbers.get("cuda_peak_bytes", numbers.get("rss_peak_bytes", 0.0)),
        memory_source="peak of torch.cuda.memory_stats" if is_cuda
        else "peak resident memory of the process" if "rss_peak_bytes" in numbers else "",
        processors=0 if is_cuda else int(facts.get("host.cpus_usable", 0)),
        processor_share=steps.processor_share,
    )  # fmt: skip


def _steps(
    connection: sa.Connection, run: sa.Row[Any], world_size: int, stages: Mapping[int, int]
) -> _Steps:
    attempt = tables.attempt.c
    last = connection.scalar(
        sa.select(attempt.step_hi)
        .where(attempt.run_id == run.run_id, attempt.attempt == run.attempt)
    )  # fmt: skip
    nothing = _Steps(1, 0, 0, 0.0, {}, np.zeros(0), 0, 1.0)
    if not last:
        return nothing
    most = min(RECENT_STEPS, steps_of_many(world_size, ()))
    first, last = typical_range(connection, run.run_id, last, most, onset_step(run))
    planes = load_range(connection, run.run_id, _METRICS, first, last, run.attempt)
    planes = waiting_planes(planes)
    flags = np.nan_to_num(planes["flags"]).astype(np.int64)
    longest = quiet(np.nanmax, planes["step"], axis=0)
    usual = ~np.any(flags & _SPECIAL, axis=0) & ~np.isnan(longest)
    if not usual.any():
        return nothing
    low, high = np.quantile(longest[usual], (0.25, 0.75))
    usual &= (longest >= low) & (longest <= high)
    planes = {name: plane[:, usual].astype(np.float64) for name, plane in planes.items()}
    parts = split(planes, [stages.get(rank, -1) for rank in range(len(planes["step"]))])
    known = ~np.any([np.isnan(part) for part in parts.values()], axis=0)
    if not known.any():
        return nothing
    computing = np.where(known, parts["forward"] + parts["backward"], np.nan)
    means = {name: float(part[known].mean()) for name, part in parts.items()}
    counted = median(median(planes["microbatches"], 1)[None], 1)[0]
    own = (planes["step"] - planes["blocked"])[known].sum()
    share = float(np.nansum(planes["cpu"][known]) / own) if own > 0 else 1.0
    return _Steps(
        first, last, int(usual.sum()), sum(means.values()), means, median(computing, 1),
        int(np.nan_to_num(counted)), min(1.0, share) or 1.0,
    )  # fmt: skip


def _slowest_stage(computing_ms: Array, stage_of: Mapping[int, int]) -> float:
    """Return the ms of the stage that computes longest; 0 where none is known."""
    found = [
        float(median(np.array([computing_ms[rank] for rank, at in stage_of.items()
                               if at == stage and rank < len(computing_ms)])[None], 1)[0])
        for stage in sorted(set(stage_of.values()))
        if any(at == stage and rank < len(computing_ms) for rank, at in stage_of.items())
    ]  # fmt: skip
    known = [value for value in found if value == value]
    return max(known, default=0.0)


def _why_no_layout(
    families: Sequence[Family], world_size: int, places: int, stage_of: Mapping[int, int]
) -> str:
    """Return what a run is that the planner has no inputs of; empty where it has."""
    layout = layout_of(families, range(world_size), stage_of)
    sizes = {axis.name: axis.size for axis in layout.axes if axis.size > 1}
    if len(sizes) < 2 and places < 2:
        known = next(iter(sizes), "")
        if any(word in known for word in ("tensor", "context", "expert")):
            return f"its layers are cut ({known}): of these runs a replay alone answers"
        return ""
    if places == world_size:
        return ""
    axes = " \N{MULTIPLICATION SIGN} ".join(f"{name} {size}" for name, size in sizes.items())
    return f"several axes ({axes}): of these runs a replay alone answers"


def _sent(
    connection: sa.Connection,
    run: sa.Row[Any],
    families: Sequence[Family],
    world_size: int,
    steps: tuple[int, int],
) -> tuple[Sent, ...]:
    """Return the messages of the groups that hold all ranks."""
    whole = [
        group.name
        for family in families
        for group in (*family.groups, *family.also)
        if len(group.ranks) == world_size
    ]
    inside = Wanted(run.run_id, run.attempt, lo=steps[0], hi=steps[1])
    calls = calls_of(connection, choose(connection, inside, MAX_CALLS), inside)
    if not len(calls):
        return ()
    met = meetings(calls, dict.fromkeys(whole, world_size), {})
    of_whole = np.isin(np.array(calls.groups)[calls.group], whole)
    operation, size = calls.operation[of_whole], calls.numbers["size_bytes"][of_whole]
    took = np.full(len(operation), np.nan)
    # Which call a meeting is of does not count: quantiles of each operation and size do.
    for place, size_bytes in {*zip(met.operation.tolist(), met.size_bytes.tolist(), strict=True)}:
        alike = np.flatnonzero((operation == place) & (size == size_bytes))
        known = met.transfer_ns[(met.operation == place) & (met.size_bytes == size_bytes)] / 1e6
        took[alike[: len(known)]] = known[: len(alike)]
    names = [calls.operations[place] for place in operation.tolist()]
    num_steps = len(np.unique(calls.numbers["step"]))
    return sent_of(names, size, took, world_size, num_steps)


def _numbers(connection: sa.Connection, run: sa.Row[Any], last: int) -> dict[str, float]:
    """Return the largest value of any rank of each number that was sent.

    What does not change is sent in the first steps of a process, peaks of memory all the time.
    """
    first = first_step(connection, run.run_id)
    found = _largest(connection, run, _CONSTANTS, first, first + _FIRST_STEPS)
    return found | _largest(connection, run, _PEAKS, max(first, last - _PEAK_STEPS), last)


def _largest(
    connection: sa.Connection, run: sa.Row[Any], names: tuple[str, ...], first: int, last: int
) -> dict[str, float]:
    table = tables.metric.c
    rows = connection.execute(
        sa.select(table.name, sa.func.max(table.value))
        .where(
            table.run_id == run.run_id, table.attempt == run.attempt,
            # the key of the numbers is by name, rank and step
            table.name.in_(names), table.rank.in_(range(min(run.world_size, _MAX_RANKS))),
            table.step.between(first, last),
        )
        .group_by(table.name)
    )  # fmt: skip
    return {name: float(value) for name, value in rows if value is not None}
