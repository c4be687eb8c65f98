""" "Healthy" is not said over a loss: of advice, of a suspicion, of a job that became slower."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from numpy.typing import NDArray

from rankscope_server.analysis.state import RunState
from rankscope_server.diagnose.regression.detector import rise_of
from rankscope_server.findings.finding import Finding
from rankscope_server.findings.policy import POLICY
from rankscope_server.observe.step_table import PAST_BLOCKS, StepTable
from rankscope_server.verdict.answers import Coverage
from rankscope_server.verdict.verdict import answer_of
from tests.analysis.missing import look_at, run_named
from tests.simulator.delivery import apply
from tests.simulator.dropping import Drop

EVERY = frozenset(range(8))
NO_PAST = np.zeros((0, 3))


def test_a_clean_run_is_healthy() -> None:
    assert look_at(run_named("ddp-8 clean", 0), ())[-1].answer.state == "healthy"


@pytest.mark.parametrize(
    ("detector", "kind", "onset", "said", "text"),
    [
        ("pipeline", "pipeline_bubble", None, "advice",
         "No fault; advice worth 33 % of the throughput: Use more microbatches"),
        ("goodput", "slow_checkpoint", 45, "advice",
         "No fault; advice worth 33 % of the throughput: Use more microbatches"),
        ("straggler", "sequence_imbalance", 45, "advice",
         "No fault; advice worth 33 % of the throughput: Use more microbatches"),
        ("straggler", "slow_compute", 45, "unknown",
                        "No verdict: 33 % of the throughput may be lost since step 45, not for "
                        "long enough, or not clearly enough, to be sure"),
    ],
)  # fmt: skip
def test_what_costs_is_told_whatever_its_severity(
    detector: str, kind: str, onset: int | None, said: str, text: str
) -> None:
    run, state = run_named("ddp-8 clean", 0), RunState("x")
    apply(state, run.items)
    state.look(10**18)
    (attempt,) = state._attempts.values()
    advice = Finding(
        key="0/x", detector=detector, kind=kind, severity="info", attempt=0,
        what="Use more microbatches", why="", next="Try 8", onset_step=onset, confidence=0.5,
        confidence_text="low", would_be_wrong_if="", policy_hash="", cost_throughput_ratio=0.33,
    )  # fmt: skip
    whole = Coverage(8, 8, 8, (), (), "")
    answer = answer_of(attempt, None, [advice], whole, POLICY)
    assert (answer.state, answer.text, answer.deciding) == (said, text, ("Try 8",))
    for cheap in (
        dataclasses.replace(advice, cost_throughput_ratio=0.01),
        dataclasses.replace(advice, state="recovered"),
    ):
        assert answer_of(attempt, None, [cheap], whole, POLICY).state == "healthy"


def rise(*levels_ms: float) -> str:
    """Return what is said of steps of these levels, 60 each, with 3 % of noise."""
    noise = np.random.default_rng(1).normal(1.0, 0.03, 60 * len(levels_ms))
    return rise_of(NO_PAST, np.arange(1, noise.size + 1), np.repeat(levels_ms, 60) * noise, POLICY)


def test_a_job_that_became_slower_is_told_with_its_step() -> None:
    assert rise(300, 500) == (
        "since about step 61 a step takes 1.7 times as long as before (499 ms, 302 ms before), "
        "and why is not known"
    )
    assert "about step 121 " in rise(300, 310, 500, 700)


@pytest.mark.parametrize("onset", [405, 433, 470, 499])
def test_since_when_it_takes_longer_is_said_to_the_step(onset: int) -> None:
    """Blocks of steps end with the newest one, and their borders are not where it began."""
    chance = np.random.default_rng(onset)
    times = np.where(np.arange(1, 801) < onset, 80.0, 200.0) * np.exp(chance.normal(0, 0.05, 800))
    for newest in (740, 777, 800):
        said = rise_of(NO_PAST, np.arange(1, newest + 1), times[:newest], POLICY)
        assert f"since about step {onset} " in said


def test_one_long_step_in_ten_is_a_rise_too() -> None:
    times = np.full(400, 100.0)
    times[200::10] = 1100.0
    assert rise_of(NO_PAST, np.arange(1, 401), times, POLICY) == (
        "since about step 201 a step takes 2.0 times as long as before (200 ms, 100 ms before), "
        "and why is not known"
    )


@pytest.mark.parametrize(
    "levels", [(300, 310), (300, 500, 300), (500, 300), (300,), (300, 500, 300, 500), (30, 60)]
)
def test_noise_bursts_and_what_was_there_before_are_no_rise(levels: tuple[float, ...]) -> None:
    assert rise(*levels) == ""


@pytest.mark.parametrize(("before_ms", "after_ms"), [(2.0, 5.0), (2.0, 2.0), (5.0, 2.0)])
def test_a_rise_is_known_when_the_steps_before_it_have_left(
    before_ms: float, after_ms: float
) -> None:
    table, times_ms = StepTable(), np.repeat([before_ms, after_ms], [10_000, 20_000])
    for rank in (0, 1):
        put(table, rank, times_ms)
    steps = np.arange(len(times_ms) - table.num_steps, len(times_ms)) + 1
    text = rise_of(table.past.blocks, steps, table.get("duration")[0], POLICY)
    if after_ms > before_ms:
        assert text.startswith("since about step 10,")
        assert "2.5 times as long as before (5.0 ms, 2.0 ms before)" in text
    else:
        assert not text


def test_the_past_is_bounded_and_keeps_the_time_of_all_steps() -> None:
    table, times_ms = StepTable(), np.full(40_000, 1_500.0)
    put(table, 0, times_ms)
    blocks = table.past.blocks
    assert len(blocks) <= PAST_BLOCKS
    assert blocks[:, 1].sum() == table.dropped_steps == len(times_ms) - table.num_steps
    assert blocks[:, 2].sum() == 1_500.0 * table.dropped_steps
    assert np.all(np.diff(blocks[:, 0]) > 0)


def put(table: StepTable, rank: int, times_ms: NDArray[np.float64]) -> None:
    """Give a table the steps of a rank, a thousand at a time."""
    for begin in range(0, len(times_ms), 1000):
        lasts_ns = (times_ms[begin : begin + 1000] * 1e6).astype(np.int64)
        steps = np.arange(begin, begin + len(lasts_ns)) + 1
        started_ns = np.cumsum(lasts_ns) + begin * 10**9
        table.put(rank, {"step": steps, "duration_ns": lasts_ns, "started_ns": started_ns})


@pytest.mark.parametrize(("lo", "hi", "share"), [(39, 90, "67 %"), (60, 80, "26 %")])
def test_steps_that_no_rank_reported_are_missed(lo: int, hi: int, share: str) -> None:
    run = run_named("small-pipeline-8 clean", 0)
    drop = Drop("steps", EVERY, "middle", frozenset(range(lo, hi + 1)))
    answer = look_at(run, (drop,))[-1].answer
    assert answer.state == "unknown"
    assert f"Ranks 0 to 7: the steps are not known in {share} of the newest steps" in answer.text
