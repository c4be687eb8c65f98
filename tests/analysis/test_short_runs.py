"""Runs of some dozens of steps, as an hour with long steps or with thinned ones leaves them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rankscope_server.findings.statistics import scatter
from tests.analysis.simulator import CALM, Fault, Job, Noise, analyse, record


@pytest.mark.parametrize(
    ("num_steps", "shift", "most"),
    # beside a shift what is left counts as the smaller part of all differences
    [(45, 0.0, 1.15), (60, 0.0, 1.1), (200, 0.0, 1.1), (45, 50.0, 6.0), (60, 50.0, 2.5),
     (200, 50.0, 1.2)],
)  # fmt: skip
def test_a_lasting_shift_hardly_widens_the_scatter(
    num_steps: int, shift: float, most: float
) -> None:
    values = np.random.default_rng(num_steps).normal(0.0, 1.0, (2000, num_steps))
    values[:, num_steps // 2 :] += shift
    assert 0.9 < np.median(scatter(values, lag=20)) < most


@pytest.mark.parametrize("num_stages", [1, 4])
@pytest.mark.parametrize("kind", ["slow_compute", "slow_data"])
def test_a_slow_rank_is_not_missed_while_most_of_the_run_is_slow(
    num_stages: int, kind: str
) -> None:
    """The scatter that it is compared with must not be its own."""
    for seed in range(12):
        chance = random.Random(f"{seed} {kind} {num_stages}")
        onset, slow_steps = chance.randint(26, 40), chance.randint(22, 60)
        rank = chance.randrange(4)
        look = analyse(record(Job(
            steps=onset + slow_steps, step_ms=900.0, num_stages=num_stages, noise=CALM, seed=seed,
            faults=(Fault(kind, rank, onset, chance.uniform(0.4, 1.0)),),  # type: ignore[arg-type]
        )))  # fmt: skip
        assert look.verdict is not None, (seed, onset, slow_steps, look.answer)
        assert look.verdict.ranks == (rank,), (seed, look.verdict)


@pytest.mark.parametrize("num_stages", [1, 4])
def test_short_healthy_runs_accuse_nobody(num_stages: int) -> None:
    for seed in range(40):
        steps = random.Random(seed).randint(25, 90)
        look = analyse(record(Job(steps=steps, num_stages=num_stages, seed=1000 + seed)))
        accused = [found for found in look.findings if found.severity != "info"]
        assert not accused, (seed, steps, accused)


@pytest.mark.parametrize("noise", [CALM, Job().noise], ids=["calm", "noisy"])
def test_where_all_ranks_of_a_short_run_became_slower_nobody_is_accused_and_it_is_said(
    noise: Noise,
) -> None:
    for seed in range(20):
        chance = random.Random(seed)
        onset, slow_steps = chance.randint(26, 60), chance.randint(40, 60)
        size, stages = chance.uniform(0.8, 1.2), chance.choice((1, 4))
        faults = tuple(Fault("slow_compute", rank, onset, size) for rank in range(4))
        look = analyse(record(Job(
            steps=onset + slow_steps, step_ms=900.0, num_stages=stages, noise=noise, seed=seed,
            faults=faults,
        )))  # fmt: skip
        accused = [found for found in look.findings if found.severity != "info" and found.ranks]
        assert not accused, (seed, onset, slow_steps, stages, accused)
        assert look.answer.state != "healthy", (seed, onset, slow_steps, stages, size)
