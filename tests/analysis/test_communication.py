"""Communication: exposed share, advice with its gain, bandwidth, and silence. Simulation."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope_server.analysis.state import RunState
from rankscope_server.diagnose.communication.detector import Communication
from rankscope_server.diagnose.communication.transfer_model import (
    MB,
    buckets_of,
    fit,
)
from rankscope_server.findings.finding import DetectorResult, Finding
from rankscope_server.findings.policy import POLICY
from tests.analysis.simulator import START_NS, Item, apply, spoil
from tests.analysis.timeline import Act, Timeline, attempt_of, ddp, noisy


@dataclass(frozen=True)
class Plan:
    """A DDP job: gradients of `total` bytes in buckets, transfers of alpha + beta S."""

    total: float = 120 * MB
    cap_mb: float = 25
    alpha_ms: float = 1.0
    beta_ms_per_mb: float = 0.5
    forward_ms: float = 30.0
    backward_ms: float = 60.0
    ranks: int = 4
    microbatches: int = 1
    every_microbatch: bool = True
    cast_ms: float = 0.0
    payload: float = 1.0
    jitter: float = 0.03  # of transfers
    slow_rank: int = -1
    seed: int = 0
    steps: int = 60

    def step_ms(self) -> float:
        return carried_out(self).step_ms(5)

    def items(self, dtype: str = "float32", skipped: bool = False) -> list[Item]:
        return carried_out(self).items(
            dtype=dtype,
            extra=lambda rank, step: {
                "microbatches": self.microbatches,
                "flags": schema.STEP_FIRST * (step == 1)
                | schema.STEP_SKIPPED * (skipped and step == 30),
            },
        )


@lru_cache(maxsize=2)  # a plan before and after advice
def carried_out(plan: Plan) -> Timeline:
    noise = noisy(plan.seed, plan.ranks, plan.steps, 0.02)
    if plan.slow_rank >= 0:
        noise[plan.slow_rank] *= 1.8
    chance = random.Random(plan.seed)

    def took(size: float) -> float:
        mean = plan.alpha_ms + plan.beta_ms_per_mb * size * plan.payload / MB
        return mean * float(np.exp(chance.gauss(0, plan.jitter)))

    program = ddp(
        plan.forward_ms, plan.backward_ms, buckets_of(plan.total, plan.cap_mb * MB), took,
        lambda rank, step: noise[rank, step], plan.microbatches, plan.every_microbatch,
        plan.cast_ms,
    )  # fmt: skip
    return Timeline(plan.ranks, plan.steps, program, {"world": tuple(range(plan.ranks))}).run()


def result_of(items: list[Item]) -> DetectorResult:
    return Communication().look(attempt_of(items).window(START_NS + 10**12))


def advice_of(result: DetectorResult) -> Finding | None:
    found = [f for f in result.findings if f.kind.startswith("communication")]
    return found[0] if found else None


def gain_of(finding: Finding) -> float:
    assert finding.cost_throughput_ratio is not None
    return finding.cost_throughput_ratio / (1 - finding.cost_throughput_ratio)


def changed(plan: Plan, finding: Finding) -> Plan:
    """Return the plan after the advice was taken."""
    if "bucket_cap_mb" in finding.next:
        return replace(plan, cap_mb=int(finding.next.split(" to ")[1].split(":")[0]))
    if "no_sync" in finding.next:
        return replace(plan, every_microbatch=False)
    assert "compress_hook" in finding.next
    cast_ms = 2 * plan.total / POLICY.cast_bytes_per_second * 1e3
    return replace(plan, payload=0.5, cast_ms=cast_ms)


def draw(seed: int) -> Plan:
    chance = random.Random(seed)
    return Plan(
        total=chance.uniform(20, 300) * MB,
        cap_mb=chance.choice([1, 5, 25, 100]),
        alpha_ms=chance.uniform(0.05, 3),
        beta_ms_per_mb=chance.choice([0.1, 0.5, 1.0, 3.0]) * chance.uniform(0.7, 1.3),
        forward_ms=chance.uniform(10, 60),
        backward_ms=chance.uniform(20, 120),
        seed=seed,
    )


def test_advice_keeps_its_promise() -> None:
    given, errors = 0, []
    for seed in range(20):
        plan = draw(seed)
        finding = advice_of(result_of(plan.items()))
        if finding is None or finding.cost_throughput_ratio is None:
            continue
        given += 1
        truth = plan.step_ms() / changed(plan, finding).step_ms() - 1
        assert truth > 0, (seed, finding.next)
        errors.append(abs(gain_of(finding) - truth) / truth)
    assert given >= 8
    assert max(errors) <= 0.30, sorted(errors)[-5:]


@pytest.mark.parametrize("seed", range(12))
def test_the_verdict_follows_the_exposed_share(seed: int) -> None:
    plan = draw(100 + seed)
    now = plan.step_ms()
    bare = replace(plan, alpha_ms=0.0, beta_ms_per_mb=0.0).step_ms()
    exposed = 1 - bare / now
    finding = advice_of(result_of(plan.items()))
    if exposed > 0.22:
        assert finding is not None
        assert finding.kind == "communication_bound"
    if exposed < 0.18:
        assert finding is None or finding.kind == "communication_advice"
    if finding is not None:
        share = float(finding.why.split(" %")[0]) / 100
        assert share == pytest.approx(exposed, abs=0.02)


def test_no_sync_is_advised_where_every_microbatch_reduces() -> None:
    plan = Plan(microbatches=4, beta_ms_per_mb=1.0, steps=40)
    finding = advice_of(result_of(plan.items()))
    assert finding is not None
    assert "no_sync" in finding.next
    truth = plan.step_ms() / replace(plan, every_microbatch=False).step_ms() - 1
    assert gain_of(finding) == pytest.approx(truth, rel=0.30)
    quiet = advice_of(result_of(replace(plan, every_microbatch=False).items()))
    assert quiet is not None
    assert "no_sync" not in quiet.next


SLOW_NETWORK = Plan(total=200 * MB, cap_mb=25, alpha_ms=0.2, beta_ms_per_mb=5.0, steps=40)


def test_compression_is_advised_on_a_slow_network() -> None:
    finding = advice_of(result_of(SLOW_NETWORK.items()))
    assert finding is not None
    assert "bf16_compress_hook" in finding.next


@pytest.mark.parametrize(("dtype", "skipped"), [("bfloat16", False), ("float16", False),
                                                ("float32", True)])  # fmt: skip
def test_compression_is_never_advised_for_short_or_overflowing_gradients(
    dtype: str, skipped: bool
) -> None:
    finding = advice_of(result_of(SLOW_NETWORK.items(dtype, skipped)))
    assert finding is not None
    assert "compress" not in finding.next


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (Plan(total=0.8 * MB, alpha_ms=20.0), "no messages of 1 MB"),
        (Plan(alpha_ms=0.05, beta_ms_per_mb=0.05), "of the step is exposed"),
    ],
    ids=["small", "hidden"],
)
def test_small_and_hidden_messages_are_left_alone(plan: Plan, text: str) -> None:
    result = result_of(plan.items())
    assert not result.findings
    assert text in result.checked[0]


def test_a_late_rank_is_not_communication() -> None:
    plan = Plan(alpha_ms=0.05, beta_ms_per_mb=0.05, slow_rank=2)
    assert not result_of(plan.items()).findings


def test_shards_get_no_bucket_advice() -> None:
    def program(rank: int, step: int) -> list[Act]:
        gather = Act("issue", 20.0, size_bytes=32 * MB, operation="all_gather_into_tensor")
        return [gather, Act("wait"), Act("compute", 20.0), gather, Act("wait")]

    job = Timeline(4, 60, program, {"world": (0, 1, 2, 3)}).run()
    finding = advice_of(result_of(job.items()))
    assert finding is not None
    assert finding.kind == "communication_bound"
    assert finding.cost_throughput_ratio is None
    assert "bucket" not in finding.next


def reduce_job(took: Callable[[int], float], steps: int = 200) -> list[Item]:
    def program(rank: int, step: int) -> list[Act]:
        reduce = Act("issue", took(step), size_bytes=64 * MB)
        return [Act("compute", 200.0, "backward"), reduce, Act("wait", phase="backward")]

    return Timeline(4, steps, program, {"world": (0, 1, 2, 3)}).run().items()


def test_lost_bandwidth_is_seen_and_steady_bandwidth_is_not() -> None:
    fell = result_of(reduce_job(lambda step: 20.0 if step < 100 else 40.0)).findings
    (finding,) = (f for f in fell if f.kind == "low_bus_bandwidth")
    assert finding.group == "world"
    # 2 (n-1)/n x 64 MB / 40 ms
    assert f"{1.5 * 64 * MB / 40e6:.2f} GB/s" in finding.why
    chance = random.Random(0)
    steady = result_of(reduce_job(lambda step: 20.0 * chance.uniform(0.95, 1.2))).findings
    assert not [f for f in steady if f.kind == "low_bus_bandwidth"]


def test_the_first_slow_trial_of_all_ranks_is_no_link() -> None:
    assert not [
        f
        for f in result_of(reduce_job(lambda step: 60.0 if step == 2 else 20.0)).findings
        if f.kind == "low_bus_bandwidth"
    ]


def test_order_doubling_and_scale_do_not_matter() -> None:
    plan = Plan(cap_mb=100, total=300 * MB)
    plain = advice_of(result_of(plan.items()))
    spoilt = advice_of(result_of(spoil(plan.items(), seed=4, lost=0.0)))
    assert plain is not None
    assert plain == spoilt
    state = RunState("run")
    apply(state, plan.items())
    look = state.look(START_NS + 10**12)
    assert plain.key in {finding.key for finding in look.findings}
    assert look.verdict is None  # advice accuses nobody


# --- model ---------------------------------------------------------------------------------------


def test_latency_and_bandwidth_are_told_apart_from_scattered_times() -> None:
    chance = np.random.default_rng(0)
    sizes = np.repeat(np.array([1, 4, 16, 25]) * MB, 40).astype(float)
    times = (0.8 + 0.3 * sizes / MB) * np.exp(chance.normal(0, 0.05, len(sizes)))
    times[::20] *= 5  # hiccups
    model = fit(sizes, times)
    assert model is not None
    assert model.alpha_ms == pytest.approx(0.8, abs=0.2)
    assert model.beta_ms_per_byte * MB == pytest.approx(0.3, rel=0.05)
    assert fit(np.full(9, 25.0 * MB), np.ones(9)) is None


def test_buckets_are_those_of_ddp() -> None:
    assert [size / MB for size in buckets_of(60 * MB, 25 * MB)] == [1, 25, 25, 9]
    assert [size / MB for size in buckets_of(0.5 * MB, 25 * MB)] == [0.5]
