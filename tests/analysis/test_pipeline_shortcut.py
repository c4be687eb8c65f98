"""Uneven stages and bubbles, where the steps cannot be replayed."""

from __future__ import annotations

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope_server.analysis.state import RunState
from rankscope_server.findings.finding import Finding
from tests.analysis.simulator import MS, START_NS

STEPS = 120


def findings(
    own_ms: list[float], microbatches: int, noise: float = 0.1, steps: int = STEPS
) -> list[Finding]:
    """Return what is said of one rank a stage with such self time; no collectives are known."""
    chance = np.random.default_rng(3)
    stages, state = len(own_ms), RunState("run")
    own = np.array(own_ms)[:, None] * np.exp(noise * chance.standard_normal((stages, steps)))
    step_ms = own.max(axis=0) * (microbatches + stages - 1) / microbatches
    started = START_NS + np.r_[0, np.cumsum(step_ms)[:-1]] * MS
    for rank in range(stages):
        state.apply_record(schema.RankRegistered(
            attempt=0, rank=rank, time_ns=START_NS, world_size=stages, local_rank=rank,
            local_world_size=stages, node_rank=0, host="a", pid=1 + rank, stage=rank,
            num_stages=stages, num_microbatches=microbatches,
        ))  # fmt: skip
        columns = {name: np.zeros(steps, np.int64) for name in schema.STEP_COLUMNS}
        columns["step"] = np.arange(1, steps + 1)
        columns["started_ns"] = started.astype(np.int64)
        columns["duration_ns"] = (step_ms * MS).astype(np.int64)
        columns["backward_ns"] = columns["duration_ns"]
        columns["backward_blocked_ns"] = ((step_ms - own[rank]) * MS).astype(np.int64)
        chunk = schema.Chunk(
            kind="steps", attempt=0, rank=rank, host="a", count=steps, time_lo_ns=START_NS,
            time_hi_ns=int(started[-1]), data=b"%d" % rank,
        )  # fmt: skip
        state.apply_chunk(chunk, dict(columns))
    look = state.look(int(started[-1]) + 10**9)
    return [finding for finding in look.findings if finding.detector == "pipeline"]


def test_the_stage_that_works_longer_is_named() -> None:
    (found,) = findings([60.0, 40.0, 40.0, 40.0], 16)
    assert (found.kind, found.ranks, found.severity) == ("stage_imbalance", (), "info")
    assert "Stage 0 (rank 0)" in found.why
    # a step of 60 * 15 / 16 + 180 / 16 = 67.5 ms; of even stages of 45 ms it takes 53.4 ms
    assert found.cost_throughput_ratio == pytest.approx(1 - 53.4 / 67.5, abs=0.03)
    assert "could not be replayed" in found.why


def test_few_microbatches_are_told_with_how_many_are_enough() -> None:
    (found,) = findings([40.0] * 4, 2, noise=0.01)
    assert (found.kind, found.ranks, found.severity) == ("pipeline_bubble", (), "info")
    assert "27 microbatches" in found.next  # 3 * 0.9 / 0.1
    assert found.cost_throughput_ratio == pytest.approx(1 - (2 / 5) / (27 / 30), abs=0.02)


def test_few_microbatches_are_told_in_few_steps() -> None:
    """They may take minutes; which stage is slow wants more of them."""
    (found,) = findings([40.0] * 4, 2, steps=22)
    assert found.kind == "pipeline_bubble"
    assert findings([60.0, 40.0, 40.0, 40.0], 16, steps=22) == []


def test_two_stages_with_two_microbatches_are_told_where_all_works_as_planned() -> None:
    """They idle a third of each step, and measured a hair less: the edge of what is said."""
    (found,) = findings([40.0, 40.1], 2, noise=0.001)
    assert found.kind == "pipeline_bubble"


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.3])
def test_an_even_pipeline_with_enough_microbatches_is_left_alone(noise: float) -> None:
    assert findings([40.0, 41.0, 40.0, 39.0], 16, noise) == []
