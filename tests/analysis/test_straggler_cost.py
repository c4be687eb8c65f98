"""The cost of a straggler through the whole analysis, against the same job without it."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from rankscope_server.analysis.state import RunState
from rankscope_server.findings.finding import Finding
from tests.analysis.simulator import START_NS, Item, apply
from tests.analysis.timeline import (
    Timeline,
    data_parallel,
    groups_of,
    noisy,
    pipeline,
)

STEPS = 200


@dataclass(frozen=True)
class Case:
    slow: Timeline
    healthy: Timeline
    stages: list[int]
    rank: int
    onset: int

    @property
    def truth(self) -> float:
        skip = self.onset + 2
        return 1 - self.healthy.step_ms(skip) / self.slow.step_ms(skip)

    def items(self) -> list[Item]:
        return self.slow.items(stages=self.stages, clock_error_ms=200, hosts=2)


def draw(seed: int, kind: str, onset: int | None = None) -> Case:
    chance = random.Random(seed)
    stages = 1 if kind == "dp" else 4
    ranks = chance.choice([4, 8]) if kind == "dp" else stages * chance.choice([1, 4])
    microbatches = chance.choice([4, 8])
    onset = chance.randint(80, 110) if onset is None else onset
    rank, size = chance.randrange(ranks), chance.uniform(0.3, 1.0)
    runs = []
    for share in (size, 0.0):
        factor = noisy(seed, ranks, STEPS, 0.04)
        factor[rank, onset:] *= 1 + share
        work = lambda r, s, f=factor: f[r, s]  # noqa: E731
        if kind == "dp":
            program = data_parallel(30, 60, 4, 8, work)
            groups = {"world": tuple(range(ranks))}
        else:
            program = pipeline(
                stages, microbatches, "1f1b", lambda r, s, w=work: 5 * w(r, s), 0.5, ranks // stages
            )
            groups = groups_of(stages, ranks // stages)
        runs.append(Timeline(ranks, STEPS, program, groups).run())
    places = [] if stages == 1 else [r % stages for r in range(ranks)]
    return Case(runs[0], runs[1], places, rank, onset)


def run_of(factor: NDArray[np.float64]) -> Timeline:
    """Return a data-parallel job whose work is multiplied by `factor`, ranks x (steps + 1)."""
    ranks, columns = factor.shape
    program = data_parallel(30, 60, 4, 8, lambda r, s: factor[r, s])
    return Timeline(ranks, columns - 1, program, {"world": tuple(range(ranks))}).run()


def straggler(items: list[Item]) -> list[Finding]:
    state = RunState("run")
    apply(state, items)
    look = state.look(START_NS + 10**12)
    return [finding for finding in look.findings if finding.detector == "straggler"]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["dp", "pipeline"])
def test_the_cost_is_within_two_points(kind: str, seed: int) -> None:
    case = draw(seed, kind)
    found = straggler(case.items())
    if case.truth < 0.01 and not found:
        return  # the pipeline hides it
    (finding,) = found
    assert finding.ranks == (case.rank,)
    assert finding.cost_throughput_ratio == pytest.approx(case.truth, abs=0.02)
    assert "by a replay of" in finding.why


def test_also_of_a_rank_that_was_slow_from_the_start() -> None:
    case = draw(3, "dp", onset=1)
    (finding,) = straggler(case.items())
    assert finding.ranks == (case.rank,)
    assert finding.cost_throughput_ratio == pytest.approx(case.truth, abs=0.02)


def test_without_collectives_the_shortcut_is_used_and_said() -> None:
    case = draw(1, "dp")
    items = [
        (arrival, what)
        for arrival, what in case.items()
        if not isinstance(what, tuple) or what[0].kind == "steps"
    ]
    (finding,) = straggler(items)
    assert "by the shortcut, as no collectives are recorded" in finding.why
    assert finding.cost_throughput_ratio == pytest.approx(case.truth, abs=0.02)


def test_looks_on_the_way_do_not_change_the_last_one() -> None:
    items = draw(2, "pipeline").items()
    watched, once = RunState("run"), RunState("run")
    for begin in range(0, len(items), 29):
        apply(watched, items[begin : begin + 29])
        watched.look(START_NS + 10**12)
    apply(once, items)
    end = START_NS + 10**12
    assert watched.look(end).findings == once.look(end).findings


@pytest.mark.parametrize("seed", range(4))
def test_ranks_of_one_host_work_slower_again_without_the_slow_one(seed: int) -> None:
    """Four ranks share two processors: while one is held up, the others have its share."""
    chance = random.Random(f"shared {seed}")
    ranks, onset, share = 4, 90, chance.uniform(0.6, 1.0)
    rank, freed = chance.randrange(ranks), chance.uniform(0.8, 0.9)
    runs = []
    for is_slow in (True, False):
        factor = noisy(seed, ranks, STEPS, 0.03)
        if is_slow:
            factor[:, onset:] *= freed
            factor[rank, onset:] *= (1 + share) / freed
        runs.append(run_of(factor))
    truth = 1 - runs[1].step_ms(onset + 2) / runs[0].step_ms(onset + 2)
    (finding,) = straggler(runs[0].items(stages=[], clock_error_ms=0, hosts=1))
    assert finding.ranks == (rank,)
    assert finding.cost_throughput_ratio == pytest.approx(truth, abs=0.02)


@pytest.mark.parametrize("seed", range(4))
def test_a_slow_rank_is_no_less_slow_where_all_became_faster(seed: int) -> None:
    """Other work left the host, or the steps became shorter, as the rank became slow."""
    chance = random.Random(f"faster {seed}")
    ranks, onset, share = 4, 90, chance.uniform(0.6, 1.0)
    rank, faster = chance.randrange(ranks), chance.uniform(0.4, 0.65)
    runs = []
    for is_slow in (True, False):
        factor = noisy(seed, ranks, STEPS, 0.03)
        factor[:, onset:] *= faster
        factor[rank, onset:] *= 1 + share * is_slow
        runs.append(run_of(factor))
    truth = 1 - runs[1].step_ms(onset + 2) / runs[0].step_ms(onset + 2)
    (finding,) = straggler(runs[0].items(stages=[], clock_error_ms=0, hosts=1))
    assert (finding.ranks, finding.state) == ((rank,), "open")
    # less than the truth by what the others would have got of its processors, at most
    assert truth - 0.25 < (finding.cost_throughput_ratio or 0) < truth + 0.02
    assert finding.severity != "info"


@pytest.mark.parametrize("seed", range(8))
def test_each_of_several_slow_ranks_is_named(seed: int) -> None:
    """One hides the other: mended alone, neither gains much."""
    chance = random.Random(f"several {seed}")
    ranks = chance.choice([4, 5, 8, 16])
    slow = chance.sample(range(ranks), 2 if ranks < 6 else 3)
    onsets = {rank: chance.randint(60, 140) for rank in slow}
    sizes = {rank: chance.uniform(0.4, 1.4) for rank in slow}
    runs = []
    for is_slow in (True, False):
        factor = noisy(seed, ranks, STEPS + 40, 0.04)
        for rank in slow:
            factor[rank, onsets[rank] :] *= 1 + sizes[rank] * is_slow
        runs.append(run_of(factor))
    skip = max(onsets.values()) + 2
    truth = 1 - runs[1].step_ms(skip) / runs[0].step_ms(skip)
    found = straggler(runs[0].items(stages=[], clock_error_ms=0, hosts=2))
    found = [one for one in found if one.state == "open"]
    assert {rank for one in found for rank in one.ranks} == set(slow)
    assert not {rank for one in found for rank in one.victims} & set(slow)
    total = sum(one.cost_throughput_ratio or 0 for one in found)
    assert 0.6 * truth < total < 1.2 * truth
