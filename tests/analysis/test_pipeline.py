"""Pipelines: the split of the bubble, the even split, and silence. Simulation."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

from rankscope.wire import schema
from rankscope_server.analysis.state import RunState
from rankscope_server.diagnose.attempt import AttemptState
from rankscope_server.diagnose.pipeline.detector import _microbatches
from rankscope_server.diagnose.pipeline.split import Split, best_split, split_of
from rankscope_server.findings.finding import Finding
from rankscope_server.findings.policy import POLICY
from rankscope_server.findings.text import ratio_text
from rankscope_server.verdict.answers import Look
from tests.analysis.simulator import START_NS, Item, apply, spoil
from tests.analysis.timeline import Timeline, attempt_of, groups_of, noisy, pipeline

OPTIMIZER_MS, WORLD_MS = 2.0, 0.2
CELLS = ("data", "forward", "backward", "optimizer", "other")


@dataclass(frozen=True)
class Plan:
    """A pipeline job; `uneven` is what one stage computes beyond the others, as a share."""

    stages: int
    microbatches: int
    schedule: str = "1f1b"
    replicas: int = 1
    uneven: float = 0.0
    slow_stage: int = 0
    transfer_ms: float = 0.5
    sigma: float = 0.01
    seed: int = 0
    steps: int = 16
    slow_rank: int = -1
    slow_from: int = 1
    slow_size: float = 0.0

    def stage_factors(self) -> np.ndarray:
        factors = np.ones(self.stages)
        factors[self.slow_stage] += self.uneven
        return factors

    def run(self, even: bool = False, transfer_ms: float | None = None) -> Timeline:
        ranks = self.stages * self.replicas
        noise = noisy(self.seed, ranks, self.steps, self.sigma)
        if self.slow_rank >= 0:
            noise[self.slow_rank, self.slow_from :] *= 1 + self.slow_size
        of_stage = self.stage_factors()
        if even:
            of_stage[:] = of_stage.mean()
        program = pipeline(
            self.stages, self.microbatches, self.schedule,
            lambda rank, step: 5 * of_stage[rank % self.stages] * noise[rank, step],
            self.transfer_ms if transfer_ms is None else transfer_ms,
            self.replicas, OPTIMIZER_MS,
        )  # fmt: skip
        return Timeline(ranks, self.steps, program, groups_of(self.stages, self.replicas)).run()

    def items(self, *, microbatches: int = -1, per_chunk: int = 10) -> list[Item]:
        stages = [rank % self.stages for rank in range(self.stages * self.replicas)]
        said = self.microbatches if microbatches < 0 else microbatches
        return self.run().items(stages=stages, microbatches=said, per_chunk=per_chunk)


def split(state: AttemptState, microbatches: int) -> Split:
    replay, _ = state.replays.newest(state.steps, state.ranks, state.groups, POLICY)
    columns = np.searchsorted(state.steps.steps, replay.steps)
    cells = {name: state.steps.get(name)[:, columns].astype(float) for name in CELLS}
    return split_of(replay, cells, microbatches, 1)


def test_what_ranks_say_of_their_stages_counts_before_what_their_sends_tell() -> None:
    attempt = attempt_of(Plan(4, 8, "gpipe", 1).items())
    for held in (0, 2):
        for rank, known in dict(attempt.ranks).items():
            attempt.apply_record(msgspec.structs.replace(
                known, time_ns=known.time_ns + 1 + held, num_local_stages=held
            ))  # fmt: skip
            assert attempt.ranks[rank].num_local_stages == held
        replay, programs = attempt.replays.newest(
            attempt.steps, attempt.ranks, attempt.groups, POLICY
        )
        assert _microbatches(attempt.window(0), replay, programs) == (8, held or 1)


def look_at(items: list[Item]) -> Look:
    state = RunState("run")
    apply(state, items)
    return state.look(START_NS + 10**12)


def pipeline_findings(look: Look) -> list[Finding]:
    return [finding for finding in look.findings if finding.detector == "pipeline"]


def draw(seed: int) -> Plan:
    chance = random.Random(seed)
    stages, microbatches = chance.choice([4, 8, 16]), chance.choice([4, 8, 16, 32])
    schedules = ["gpipe", "1f1b"] if microbatches >= stages else ["gpipe"]
    return Plan(
        stages=stages,
        microbatches=microbatches,
        schedule=chance.choice(schedules),
        replicas=chance.choice([1, 2]) if stages < 16 else 1,
        uneven=chance.uniform(0.2, 1.0),
        slow_stage=chance.randrange(stages),
        transfer_ms=chance.uniform(0.05, 1.0),
        seed=seed,
        steps=14,
    )


@pytest.mark.parametrize("seed", range(16))
def test_each_part_of_the_bubble_is_within_a_point(seed: int) -> None:
    plan = draw(seed)
    found = split(attempt_of(plan.items()), plan.microbatches)
    now, even = plan.run().step_ms(3), plan.run(even=True).step_ms(3)
    at_once = plan.run(even=True, transfer_ms=0.0).step_ms(3)
    span = now - OPTIMIZER_MS - WORLD_MS - (plan.replicas > 1)
    work = 15 * plan.stage_factors().mean()
    assert found.bubble == pytest.approx(1 - work * plan.microbatches / span, abs=0.01)
    assert found.schedule == pytest.approx((plan.stages - 1) * work / span, abs=0.01)
    assert found.imbalance == pytest.approx((now - even) / span, abs=0.01)
    assert found.transfer == pytest.approx((even - at_once) / span, abs=0.01)
    assert found.balanced_step_ms == pytest.approx(even, rel=0.01)
    assert found.slowest_stage == plan.slow_stage


def test_a_long_pipeline_too() -> None:
    plan = Plan(32, 48, uneven=0.4, slow_stage=20, transfer_ms=0.2, steps=12)
    found = split(attempt_of(plan.items()), plan.microbatches)
    even = plan.run(even=True).step_ms(3)
    assert found.balanced_step_ms == pytest.approx(even, rel=0.01)
    assert found.slowest_stage == 20


@pytest.mark.parametrize("microbatches", [-1, 0])
def test_the_uneven_stage_is_named_with_what_an_even_split_gives(microbatches: int) -> None:
    plan = Plan(4, 8, uneven=1.0, slow_stage=3, replicas=2, steps=40)
    (finding,) = pipeline_findings(look_at(plan.items(microbatches=microbatches)))
    assert finding.kind == "stage_imbalance"
    assert finding.ranks == (3, 7)
    assert finding.severity == "info"
    assert f"Stage 3 (ranks 3 and 7) is {ratio_text(2.0)} slower" in finding.why
    assert "by stage 3" in finding.what
    now, even = plan.run().step_ms(5), plan.run(even=True).step_ms(5)
    assert finding.cost_throughput_ratio == pytest.approx(1 - even / now, abs=0.01)
    assert f"{100 * (now / even - 1):.0f} % more throughput" in finding.next
    assert "27 microbatches" in " ".join(evidence.text for evidence in finding.evidence)


@pytest.mark.parametrize("seed", range(8))
def test_even_pipelines_are_left_alone(seed: int) -> None:
    plan = draw(seed)
    even = Plan(plan.stages, plan.microbatches, plan.schedule, plan.replicas,
                transfer_ms=plan.transfer_ms, sigma=0.05, seed=seed, steps=24)  # fmt: skip
    look = look_at(even.items())
    # with few microbatches for its stages it idles all the same, and no stage is to blame
    assert all(found.kind == "pipeline_bubble" for found in pipeline_findings(look))
    (status,) = (status for status in look.detectors if status.name == "pipeline")
    assert status.state == "ran"


def test_a_healthy_pipeline_says_that_it_idles_by_its_schedule() -> None:
    plan = Plan(4, 16, sigma=0.01, steps=60)
    end_ns = START_NS + int(plan.steps * plan.run().step_ms(5) * 1e6)
    here = [
        schema.RankState(
            attempt=0, rank=rank, time_ns=end_ns, step=plan.steps, phase="forward",
            phase_since_ns=end_ns, heartbeat_ns=end_ns,
        )
        for rank in range(4)
    ]  # fmt: skip
    state = RunState("run")
    apply(state, [*plan.items(), *((end_ns, one) for one in here)])
    look = state.look(end_ns)
    found = re.fullmatch(
        r"Healthy: 4 ranks, 60 steps, .*; the pipeline idles (\d+) % of the time, (\d+) % by its "
        r"schedule",
        look.answer.text,
    )
    assert found is not None, look.answer.text
    assert int(found[2]) == pytest.approx(100 * 3 / 19, abs=1)
    assert int(found[2]) <= int(found[1]) < 2 * int(found[2])


def test_too_few_steps_and_no_pipeline_are_said() -> None:
    def status(items: list[Item]) -> tuple[str, str]:
        (found,) = (s for s in look_at(items).detectors if s.name == "pipeline")
        return found.state, found.reason

    assert status(Plan(4, 8, uneven=1.0, steps=8).items()) == (
        "skipped", "needs 10 steps, has 7",
    )  # fmt: skip
    alone = [
        (arrival, what)
        for arrival, what in Plan(4, 8, steps=20).items()
        if not isinstance(what, schema.RankRegistered)
    ]
    assert status(alone) == ("skipped", "no rank owns a stage of a pipeline")


def test_a_slow_worker_is_not_an_uneven_stage() -> None:
    plan = Plan(4, 8, replicas=4, steps=120, slow_rank=6, slow_from=1, slow_size=0.8, sigma=0.03)
    look = look_at(plan.items())
    assert not pipeline_findings(look)
    assert look.verdict is not None
    assert (look.verdict.detector, look.verdict.ranks) == ("straggler", (6,))


def test_a_stage_of_one_rank_that_became_slow_is_folded_into_the_slow_rank() -> None:
    plan = Plan(4, 8, steps=200, slow_rank=2, slow_from=100, slow_size=0.8, sigma=0.03)
    look = look_at(plan.items())
    assert look.verdict is not None
    assert (look.verdict.detector, look.verdict.ranks) == ("straggler", (2,))
    (finding,) = pipeline_findings(look)
    assert finding.explained_by == look.verdict.key


def test_order_and_doubling_do_not_matter() -> None:
    items = Plan(4, 8, uneven=0.8, slow_stage=1, replicas=2, steps=60).items()
    plain, spoilt = (look_at(i) for i in (items, spoil(items, seed=3, lost=0.0)))
    assert pipeline_findings(plain)[0].key == pipeline_findings(spoilt)[0].key
    costs = [pipeline_findings(look)[0].cost_throughput_ratio for look in (plain, spoilt)]
    assert costs[0] == pytest.approx(costs[1], abs=1e-6)


# --- layers --------------------------------------------------------------------------------------


def brute_force(layers: list[float], stages: int) -> float:
    cuts = itertools.combinations(range(1, len(layers)), stages - 1)
    return min(
        max(
            sum(layers[a:b])
            for a, b in zip((0, *cut), (*cut, len(layers)), strict=True)
        )
        for cut in cuts
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_no_split_of_the_layers_is_better(seed: int) -> None:
    chance = random.Random(seed)
    layers = [chance.uniform(1, 10) for _ in range(chance.randint(4, 12))]
    stages = chance.randint(2, 4)
    sizes = best_split(layers, stages)
    assert sizes is not None
    assert sum(sizes) == len(layers)
    assert min(sizes) >= 1
    ends = np.cumsum(sizes)
    slowest = max(sum(layers[e - s : e]) for s, e in zip(sizes, ends, strict=True))
    assert slowest == pytest.approx(brute_force(layers, stages))


def test_a_memory_limit_moves_the_split_or_forbids_it() -> None:
    layers, sizes = [1.0, 1.0, 1.0, 3.0], [4.0, 4.0, 4.0, 1.0]
    assert best_split(layers, 2) == (3, 1)
    assert best_split(layers, 2, layer_bytes=sizes, stage_limit_bytes=9) == (2, 2)
    assert best_split(layers, 2, layer_bytes=sizes, stage_limit_bytes=5) is None
    assert best_split(layers, 5) is None


def test_layers_that_a_script_tells_make_the_advice_a_split() -> None:
    items = Plan(4, 8, uneven=1.0, slow_stage=3, steps=40).items()
    layers = [5.0, 5.0, 5.0, 5.0, 2.5, 2.5, 2.5, 2.5]  # two layers a stage would be uneven
    said = schema.Metrics(
        attempt=0, rank=0, time_ns=START_NS, step=1,
        values={f"layer_ms_{number}": value for number, value in enumerate(layers)},
    )  # fmt: skip
    (finding,) = pipeline_findings(look_at([*items, (START_NS, said)]))
    sizes = best_split(layers, 4)
    assert sizes is not None
    assert f"Give the stages {', '.join(map(str, sizes))} layers" in finding.next
