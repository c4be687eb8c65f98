"""Against earlier runs and within a run: how often it is wrong, how often it sees 3 %."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope_server.analysis.state import RunState
from rankscope_server.diagnose.regression.detector import (
    StepSlowdown,
    _why_unsure,
    past_of,
    slowdown_of,
    slower_than,
)
from rankscope_server.findings.finding import Finding
from rankscope_server.findings.policy import POLICY
from rankscope_server.observe.baseline import RunSummary, mann_whitney_p
from rankscope_server.observe.step_table import StepTable
from tests.analysis.records import registered
from tests.analysis.simulator import MS, START_NS, Job, apply, record

# ln of the run-to-run CV: median 0.13 %, p90 0.64 %, as in policy.py
CV_MEDIAN, CV_SIGMA = 0.0013, np.log(0.64 / 0.13) / 1.2816


def summary(
    chance: np.random.Generator, run: str, cv: float, rise: float = 0.0, **facts: str
) -> RunSummary:
    """Return a run whose median step scatters by `cv`, with 0.8 % of noise from step to step."""
    level = 1000.0 * (1 + rise) * np.exp(cv * chance.normal())
    times = level * np.exp(0.008 * chance.normal(size=256))
    median = float(np.median(times))
    phases = {"forward": 0.3 * median, "backward": 0.7 * median}
    return RunSummary(run, (), median, phases, times, facts)


def alarms(rise: float, trials: int, seed: int) -> float:
    chance = np.random.default_rng(seed)
    found = 0
    for _ in range(trials):
        cv = float(CV_MEDIAN * np.exp(CV_SIGMA * chance.normal()))
        earlier = [summary(chance, f"r{k}", cv) for k in range(10)]
        found += slower_than(summary(chance, "now", cv, rise), earlier, POLICY) is not None
    return found / trials


def test_false_alarms_against_earlier_runs() -> None:
    assert alarms(0.0, 3000, 1) <= 0.005


def test_recall_of_three_percent() -> None:
    assert alarms(0.03, 3000, 2) >= 0.95


def test_few_earlier_runs_need_more() -> None:
    chance = np.random.default_rng(1)
    base = [summary(chance, f"r{k}", 0.0) for k in range(5)]
    rises = {1: 0.045, 2: 0.035, 3: 0.028, 4: 0.018}
    for count, rise in rises.items():
        now = summary(chance, "now", 0.0, rise)
        assert slower_than(now, base[:count], POLICY) is None
        now = summary(chance, "now", 0.0, rise + 0.01)
        assert slower_than(now, base[:count], POLICY) is not None
    assert slower_than(summary(chance, "now", 0.0, 1.0), [], POLICY) is None
    assert slower_than(summary(chance, "now", 0.0, -0.2), base, POLICY) is None


def test_more_tokens_are_compared_by_token() -> None:
    chance = np.random.default_rng(1)

    def with_tokens(run: str, rise: float, tokens: float) -> RunSummary:
        one = summary(chance, run, 0.001, rise)
        return RunSummary(run, (), one.step_ms, one.phases_ms, one.times_ms, {}, tokens)

    earlier = [with_tokens(f"r{k}", 0.0, 1000.0) for k in range(6)]
    assert slower_than(with_tokens("now", 0.20, 1200.0), earlier, POLICY) is None
    assert slower_than(with_tokens("now", 0.30, 1200.0), earlier, POLICY) is not None


def test_mann_whitney() -> None:
    chance = np.random.default_rng(1)
    first = chance.normal(size=50)
    assert mann_whitney_p(first, first + 2) < 1e-9
    assert mann_whitney_p(first, first) == pytest.approx(0.5, abs=0.02)
    assert mann_whitney_p(np.ones(20), np.ones(20)) == 1.0


def exact_p(first: np.ndarray, second: np.ndarray) -> float:
    """Return P(U >= observed) over all orders of distinct values, by counting."""
    n, m = len(first), len(second)
    observed = int(sum((second > value).sum() for value in first))
    # ways[i][j][u]: orders of i firsts and j seconds in which u pairs have the second larger
    ways = [[np.zeros(n * m + 1) for _ in range(m + 1)] for _ in range(n + 1)]
    for i in range(n + 1):
        for j in range(m + 1):
            if i == 0 or j == 0:
                ways[i][j][0] = 1.0
                continue
            ways[i][j] += ways[i - 1][j]  # the largest is of the first
            ways[i][j][i:] += ways[i][j - 1][: n * m + 1 - i]
    return float(ways[n][m][observed:].sum() / ways[n][m].sum())


@pytest.mark.parametrize("shift", [1.5, 3.5, 5.5, 7.5])
def test_mann_whitney_against_counting_all_orders(shift: float) -> None:
    first, second = np.arange(1.0, 13), np.arange(1.0, 13) + shift
    exact, found = exact_p(first, second), mann_whitney_p(first, second)
    assert found >= exact * 0.95  # far out the normal law is on the safe side
    assert found == pytest.approx(exact, rel=0.25) or exact < 2e-3


# --- within a run --------------------------------------------------------------------------------


def times_of(seed: int, steps: int = 1200, noise: float = 0.01, drift: float = 0.0) -> np.ndarray:
    """Return a flat run; `drift` is the sigma of a slow wandering of the host."""
    chance = np.random.default_rng(seed)
    wander, value = np.zeros(steps), 0.0
    for step in range(steps):
        value = 0.99 * value + drift * 0.14 * chance.normal()
        wander[step] = value
    return 100.0 * np.exp(wander + noise * chance.normal(size=steps))


STEPS = np.arange(1, 1201)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("rise", [0.05, 0.10, 0.30])
def test_a_slow_ramp_is_gradual(seed: int, rise: float) -> None:
    times = times_of(seed) * (1 + rise * np.linspace(0, 1, 1200))
    found = slowdown_of(STEPS, times, POLICY)
    assert found is not None
    assert found.is_gradual
    assert found.rise == pytest.approx(rise, rel=0.25)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("rise", [0.04, 0.10, 0.50])
def test_a_sudden_change_has_a_step(seed: int, rise: float) -> None:
    onset = 300 + 60 * seed
    times = times_of(seed)
    times[onset:] *= 1 + rise
    found = slowdown_of(STEPS, times, POLICY)
    assert found is not None
    assert not found.is_gradual
    assert abs(found.step - (onset + 1)) <= (2 if rise >= 0.1 else 8)
    assert found.rise == pytest.approx(rise, rel=0.25)


@pytest.mark.parametrize("seed", range(5))
def test_the_step_of_a_change_does_not_move_as_steps_come(seed: int) -> None:
    """Blocks are counted from the newest step: where they divide moves, the change does not."""
    times = times_of(seed, noise=0.05)
    times[600 + 13 * seed :] *= 1.5
    seen = {
        found.step
        for count in range(800, 900, 7)
        if (found := slowdown_of(STEPS[:count], times[:count], POLICY)) is not None
    }
    assert seen == {601 + 13 * seed}


def test_flat_runs_are_silent() -> None:
    found = [slowdown_of(STEPS, times_of(seed), POLICY) for seed in range(1000)]
    assert sum(one is not None for one in found) == 0


def test_a_host_whose_load_wanders_is_no_more_than_info() -> None:
    loud = 0
    for seed in range(300):
        found = slowdown_of(STEPS, times_of(seed, noise=0.1, drift=0.08), POLICY)
        loud += found is not None and found.strength >= POLICY.slowdown_clear_sigmas
    assert loud <= 1


def test_a_run_that_became_faster_is_silent() -> None:
    times = times_of(1)
    times[600:] *= 0.8
    assert slowdown_of(STEPS, times, POLICY) is None


def in_table(step_ms: np.ndarray) -> StepTable:
    """Return the table of one rank that took steps, a thousand at a time."""
    table = StepTable()
    for begin in range(0, len(step_ms), 1000):
        lasts_ns = (step_ms[begin : begin + 1000] * MS).astype(np.int64)
        steps = np.arange(begin, begin + len(lasts_ns)) + 1
        started_ns = START_NS + np.cumsum(lasts_ns) + begin * 10**9
        table.put(0, {"step": steps, "duration_ns": lasts_ns, "started_ns": started_ns})
    return table


def slowdown_in(table: StepTable) -> StepSlowdown | None:
    return slowdown_of(table.steps, table.get("duration")[0].astype(float), POLICY, past_of(table))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_steps", [6000, 9000, 20_000])
def test_a_change_is_known_when_the_steps_before_it_have_left(num_steps: int, seed: int) -> None:
    times = times_of(seed, num_steps)
    times[1000:] *= 1.25
    times[400] = 30_000.0  # a pause, before
    table = in_table(times)
    assert table.steps[0] > 1001
    found = slowdown_in(table)
    assert found is not None
    assert not found.is_gradual
    assert found.rise == pytest.approx(0.25, rel=0.1)
    assert abs(found.step - 1001) <= 0.02 * num_steps
    assert found.strength >= POLICY.slowdown_clear_sigmas
    assert found.seconds == pytest.approx(times[1000:].sum() / 1e3, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_steps_that_have_left_make_no_healthy_job_slower(seed: int) -> None:
    """Of their time means are known: as long as always where one in three is short, or long."""
    for ratio in (0.5, 1.0, 2.0):
        short = np.random.default_rng(seed).random(9000) < 0.3
        table = in_table(times_of(seed, 9000) * np.where(short, ratio, 1.0))
        assert slowdown_in(table) is None, ratio
    over = times_of(seed, 9000)
    over[1000:8000] *= 1.4
    assert slowdown_in(in_table(over)) is None


# --- through the analysis ------------------------------------------------------------------------


def run(step_ms: np.ndarray, backward: np.ndarray, earlier: tuple[RunSummary, ...]) -> RunState:
    state = RunState("run")
    state.earlier = earlier
    for rank in range(4):
        state.apply_record(registered(rank, 4, host="a"))
        state.apply_record(schema.Environment(
            attempt=0, rank=rank, time_ns=START_NS, facts={"nccl": "2.27.5", "torch": "2.13.0"},
        ))  # fmt: skip
    put_steps(state, step_ms, backward)
    return state


def put_steps(state: RunState, step_ms: np.ndarray, backward: np.ndarray, first: int = 0) -> None:
    """Give the steps after the `first` ones of four ranks to a run."""
    for rank in range(4):
        columns = {name: np.zeros(len(step_ms), np.int64) for name in schema.STEP_COLUMNS}
        columns["step"] = first + np.arange(1, len(step_ms) + 1)
        columns["started_ns"] = START_NS + columns["step"] * 10**9
        columns["duration_ns"] = (step_ms * MS).astype(np.int64)
        columns["backward_ns"] = (backward * MS).astype(np.int64)
        columns["forward_ns"] = columns["duration_ns"] - columns["backward_ns"]
        state.apply_chunk(
            schema.Chunk(kind="steps", attempt=0, rank=rank, host="", count=len(step_ms),
                         time_lo_ns=1, time_hi_ns=2, data=f"{rank} {first}".encode()),
            dict(columns),
        )  # fmt: skip


def found_in(state: RunState) -> list[Finding]:
    look = state.look(START_NS + 10**13)
    return [finding for finding in look.findings if finding.detector == "regression"]


def earlier_runs(count: int) -> tuple[RunSummary, ...]:
    chance = np.random.default_rng(3)
    return tuple(
        RunSummary(f"r{k}", (), 100.0, {"forward": 30.0, "backward": 70.0},
                   100 * np.exp(0.008 * chance.normal(size=256)),
                   {"nccl": "2.27.3", "torch": "2.13.0"})
        for k in range(count)
    )  # fmt: skip


def test_the_phase_and_the_version_are_named() -> None:
    times = times_of(5, 300) * 1.05
    (finding,) = found_in(run(times, times - 30.0, earlier_runs(6)))
    assert (finding.kind, finding.severity, finding.ranks) == ("regression", "warning", ())
    assert "backward holds" in finding.why
    assert "nccl 2.27.3 -> 2.27.5" in finding.why
    assert finding.cost_throughput_ratio == pytest.approx(0.05 / 1.05, abs=0.005)


def test_other_code_and_other_data_are_named() -> None:
    times = times_of(5, 300) * 1.05
    then = {"code.commit": "aaaa", "dataset.length": "1000", "torch.seed": "1", "nccl": "2.27.5"}
    now = {"code.commit": "bbbb", "dataset.length": "2000", "torch.seed": "2"}
    state = run(times, times - 30.0, tuple(
        dataclasses.replace(earlier_run, facts=then) for earlier_run in earlier_runs(6)
    ))  # fmt: skip
    for rank in range(4):
        state.apply_record(
            schema.Environment(attempt=0, rank=rank, time_ns=START_NS + 1, facts=now)
        )
    (finding,) = found_in(state)
    assert "code.commit aaaa -> bbbb, dataset.length 1000 -> 2000" in finding.why
    assert "seed" not in finding.why


def test_the_same_pace_is_silent_and_says_what_was_compared() -> None:
    times = times_of(5, 300)
    state = run(times, times - 30.0, earlier_runs(6))
    assert found_in(state) == []


def test_within_a_run_through_the_analysis() -> None:
    times = 5 * times_of(5, 1200)
    times[700:] *= 1.2
    (finding,) = found_in(run(times, times - 30.0, ()))
    assert (finding.kind, finding.severity) == ("slowdown", "critical")
    assert finding.onset_step is not None
    assert abs(finding.onset_step - 700) <= 60


def test_the_step_of_a_change_is_the_same_when_it_has_left_the_table() -> None:
    times = 5 * times_of(5, 7000)
    times[700:] *= 1.2
    state = RunState("run")
    said = set()
    for begin in range(0, 7000, 500):
        put_steps(state, times[begin : begin + 500], times[begin : begin + 500] - 30.0, begin)
        said |= {(finding.onset_step, finding.what) for finding in found_in(state)}
    (finding,) = found_in(state)
    assert (finding.severity, finding.onset_step) == ("critical", 701)
    assert finding.what == "The whole job became 20 % slower at step 701"
    assert {onset for onset, _ in said} == {701}


def said_with_tokens(step_ms: np.ndarray, tokens: np.ndarray) -> list[str]:
    """Return which findings there are where each rank reports its tokens, steps x ranks."""
    state = run(step_ms, step_ms * 0.7, ())
    for step, of_ranks in enumerate(tokens, 1):
        for rank, count in enumerate(of_ranks):
            state.apply_record(schema.Metrics(
                attempt=0, rank=rank, time_ns=START_NS + step, step=step,
                values={"tokens": float(count)},
            ))  # fmt: skip
    return [finding.kind for finding in found_in(state)]


@pytest.mark.parametrize("seed", range(5))
def test_lengths_that_vary_hide_no_slowdown(seed: int) -> None:
    """Their medians differ by chance, and a little more of them is not all that it takes longer."""
    chance = np.random.default_rng(seed)
    tokens = 1000.0 * np.exp(chance.normal(0, 0.2, (1600, 4)))
    times = times_of(seed, 1600) * tokens.max(axis=1) / 250.0
    assert said_with_tokens(times, tokens) == []
    times[600:] *= 1.4
    assert said_with_tokens(times, tokens) == ["slowdown"]
    tokens[700:] *= 1.05
    assert said_with_tokens(times, tokens) == ["slowdown"]


@pytest.mark.parametrize("onset", [600, 1000, 1400])
def test_more_tokens_take_longer_and_are_no_slowdown(onset: int) -> None:
    """Also where both came before the newest steps, of which the tokens are known."""
    grown = np.where(np.arange(1600) < onset, 1.0, 1.5)
    tokens = np.full((1600, 4), 1000.0) * grown[:, None]
    assert said_with_tokens(5 * times_of(1, 1600) * grown, tokens) == []
    ramp = 1 + np.clip(np.arange(1600) - 100, 0, None) / 3000
    tokens = np.full((1600, 4), 1000.0) * ramp[:, None]
    assert said_with_tokens(5 * times_of(1, 1600) * ramp, tokens) == []


def test_scaled_times_give_the_same_finding() -> None:
    times = times_of(5, 1200)
    times[700:] *= 1.1
    plain = slowdown_of(STEPS, times, POLICY)
    scaled = slowdown_of(STEPS, 7 * times, POLICY)
    assert plain is not None
    assert scaled is not None
    assert (plain.step, plain.is_gradual) == (scaled.step, scaled.is_gradual)
    assert scaled.rise == pytest.approx(plain.rise)


@pytest.mark.parametrize("seed", range(6))
def test_healthy_jobs_of_the_simulator_are_not_accused(seed: int) -> None:
    state = RunState("run")
    recording = record(Job(steps=400, seed=seed))
    apply(state, [*recording.items(), *recording.states(recording.last_ms)])
    assert [finding for finding in found_in(state) if finding.severity != "info"] == []


@pytest.mark.parametrize("seed", range(20))
def test_a_step_close_to_an_end_is_no_slow_ramp(seed: int) -> None:
    """Of six blocks the second or the fifth is the first slow one: never "gradually"."""
    for first in (45, 85, 165, 205):
        times = times_of(seed)[:240].copy()
        times[first:] *= 2.0
        found = slowdown_of(STEPS[:240], times, POLICY)
        assert found is None or not found.is_gradual, first
        if first == 85:
            assert found is not None
            assert abs(found.step - int(STEPS[80])) <= 40


@pytest.mark.parametrize(
    ("strength", "seconds", "reason"),
    [(3.0, 600.0, "little above the scatter"), (53.0, 600.0, "costs little"),
     (53.0, 30.0, "has lasted 30 s only")],
)  # fmt: skip
def test_the_reason_for_little_confidence_is_what_it_is(
    strength: float, seconds: float, reason: str
) -> None:
    change = StepSlowdown(100, 0.02, 100.0, 102.0, False, strength, seconds)
    assert reason in _why_unsure(change, POLICY)
