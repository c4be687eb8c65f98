"""What a run cost: parts that add up, waits by what they were for, what-ifs of a replay."""

from __future__ import annotations

import dataclasses
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope_server.analysis.state import COST_PAUSE_NS, RunState
from rankscope_server.findings.text import percent_text
from rankscope_server.verdict.answers import Look
from rankscope_server.verdict.cost import PARTS, Cost
from tests.analysis.simulator import (
    CALM,
    MS,
    START_NS,
    Fault,
    Job,
    analyse,
    apply,
    record,
    spoil,
    without_fault,
)
from tests.analysis.timeline import Timeline, data_parallel, noisy

SLOW = Job(
    num_ranks=4, num_hosts=4, steps=260, noise=CALM,
    faults=(Fault("slow_compute", rank=2, start=100, size=0.8),),
)  # fmt: skip


def cost(job: Job) -> tuple[Cost, Look]:
    look = analyse(record(job))
    assert look.cost is not None
    return look.cost, look


@pytest.fixture(scope="module")
def slow() -> tuple[Cost, Look]:
    return cost(SLOW)


@pytest.mark.parametrize(
    "job",
    [
        SLOW,
        Job(num_ranks=3, steps=120),
        Job(num_ranks=4, num_stages=2, steps=120),
        Job(num_ranks=2, steps=120, checkpoint_every=20),
        Job(num_ranks=1, steps=60),
        Job(num_ranks=4, steps=200, faults=(Fault("crash", rank=1, start=90),)),
        Job(num_ranks=4, steps=200, faults=(Fault("hang", rank=1, start=90),)),
    ],
    ids=["slow", "healthy", "pipeline", "checkpoints", "one", "crash", "hang"],
)
def test_the_parts_add_up_to_the_time_of_all_ranks(job: Job) -> None:
    found, _ = cost(job)
    assert set(found.parts) == set(PARTS)
    assert min(found.parts.values()) >= 0.0
    assert sum(found.parts.values()) == pytest.approx(found.wall_seconds, rel=1e-9)
    assert found.num_ranks == job.num_ranks


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 30), lost=st.sampled_from([0.0, 0.05, 0.4]))
def test_they_add_up_whatever_is_lost_or_comes_late(seed: int, lost: float) -> None:
    job = Job(num_ranks=3, steps=60, seed=seed % 5, faults=SLOW.faults[:0])
    recording = record(job)
    state = RunState("run")
    apply(state, spoil(recording.items(), seed, lost))
    found = state.look(START_NS + int(recording.last_ms * MS)).cost
    assert found is not None
    assert min(found.parts.values()) >= 0.0
    assert sum(found.parts.values()) == pytest.approx(found.wall_seconds, rel=1e-9)


def test_straggling_is_what_the_others_wait_for_the_slow_rank(slow: tuple[Cost, Look]) -> None:
    found, look = slow
    (finding,) = [one for one in look.findings if one.kind == "slow_compute"]
    assert finding.ranks == found.slow_ranks == (2,)
    healthy, _ = cost(without_fault(SLOW))
    assert healthy.parts["straggling"] == 0.0
    assert healthy.slow_ranks == ()
    # the job is longer by what the slow rank adds, for which three others wait
    longer = (found.wall_seconds - healthy.wall_seconds) / SLOW.num_ranks
    assert longer > 3.0
    assert found.parts["straggling"] == pytest.approx(3 * longer, rel=0.15)
    for name in ("waiting", "communication"):
        assert found.parts[name] == pytest.approx(healthy.parts[name], rel=0.35, abs=0.5)


def test_it_agrees_with_the_finding_on_goodput() -> None:
    found, look = cost(dataclasses.replace(SLOW, step_ms=1_000.0, steps=700))
    (goodput,) = [one for one in look.findings if one.kind == "goodput"]
    share = found.parts["productive"] / found.wall_seconds
    assert goodput.what.startswith(f"{percent_text(share)} of the ranks' time")
    assert f"{percent_text(found.ettr)}" in " ".join(one.text for one in goodput.evidence)
    together = sum(
        found.parts[name]
        for name in ("straggling", "waiting", "communication", "communication or waiting")
    )
    assert f"{percent_text(together / found.wall_seconds)} communication and waiting" in goodput.why


def replayed(hosts: int, slow: float) -> tuple[Cost, Look, float]:
    """A job of 6 ranks whose operations are recorded; rank 3 is slow from step 81 on.

    While it is, ranks of its host work faster where they share one: they have its processors.
    The last number is the mean step of the newest 64 steps, as they ran.
    """
    ranks, steps = 6, 200
    factor = noisy(7, ranks, steps)
    factor[3, 81:] *= slow
    if hosts == 1:
        factor[[rank for rank in range(ranks) if rank != 3], 81:] /= 1 + (slow - 1) / 5
    program = data_parallel(30.0, 60.0, 3, 6.0, lambda rank, step: factor[rank, step])
    timeline = Timeline(ranks, steps, program, {"world": tuple(range(ranks))}).run()
    state = RunState("run")
    apply(state, timeline.items(hosts=hosts))
    look = state.look(START_NS + 10**12)
    assert look.cost is not None
    return look.cost, look, timeline.step_ms(skip=steps - 65)


@pytest.mark.parametrize("hosts", [6, 1], ids=["apart", "on one host"])
def test_without_the_slowness_a_step_takes_as_long_as_in_the_healthy_job(hosts: int) -> None:
    found, look, ran_ms = replayed(hosts, 1.7)
    what_if = found.what_if
    assert what_if is not None
    assert what_if.step_ms == pytest.approx(ran_ms, rel=0.02)
    assert what_if.replayed_ms == pytest.approx(what_if.step_ms, rel=0.02)
    steps = {frozenset(one.keys): one.step_ms for one in what_if.outcomes}
    keys = [one.key for one in what_if.changes]
    assert keys == ["as-peers", "alike", "no-transfers"]
    assert what_if.changes[0].label == "Rank 3 as fast as its peers"
    assert set(steps) == {
        frozenset(chosen) for num in range(4) for chosen in combinations(keys, num)
    }
    assert steps[frozenset()] == what_if.replayed_ms
    without = steps[frozenset(["as-peers"])]
    (finding,) = [one for one in look.findings if one.kind == "slow_compute"]
    assert 1.0 - without / what_if.replayed_ms == pytest.approx(
        finding.cost_throughput_ratio, abs=0.02
    )
    healthy, _, healthy_ms = replayed(hosts, 1.0)
    assert without == pytest.approx(healthy_ms, rel=0.04)
    for chosen in steps:  # what takes no time makes nothing longer
        assert steps[chosen | {"no-transfers"}] <= steps[chosen] + 1e-6
    assert healthy.what_if is not None
    assert [one.key for one in healthy.what_if.changes] == ["alike", "no-transfers"]


def test_where_there_is_no_replay_it_says_why() -> None:
    found, _ = cost(Job(num_ranks=3, steps=6))
    assert found.what_if is None
    assert found.no_what_if.startswith("needs ")


def test_of_a_run_that_goes_on_it_is_renewed_once_in_a_while() -> None:
    recording = record(Job(num_ranks=2, steps=100))
    state = RunState("run")
    items = recording.items()
    apply(state, items[: len(items) // 2])
    now_ns = START_NS + 60 * 10**9
    first = state.look(now_ns).cost
    apply(state, items[len(items) // 2 :])
    assert state.look(now_ns + COST_PAUSE_NS // 2).cost is first
    apply(state, recording.states(recording.last_ms))
    second = state.look(now_ns + COST_PAUSE_NS).cost
    assert second is not None
    assert first is not None
    assert second.wall_seconds > first.wall_seconds
    assert state.look(now_ns + 3 * COST_PAUSE_NS).cost is second, "nothing came"


def test_what_came_last_counts_though_nothing_follows() -> None:
    recording = record(Job(num_ranks=2, steps=100))
    state, now_ns = RunState("run"), START_NS + 60 * 10**9
    apply(state, recording.registrations())
    assert state.look(now_ns).cost is None
    apply(state, recording.items())
    assert state.look(now_ns + COST_PAUSE_NS // 2).cost is None, "not due"
    assert state.look(now_ns + 2 * COST_PAUSE_NS).cost is not None


def test_the_time_in_a_hang_is_stuck_up_to_the_last_record() -> None:
    recording = record(Job(num_ranks=4, steps=200, faults=(Fault("hang", rank=1, start=90),)))
    state, stuck_ms = RunState("run"), 120_000
    apply(state, recording.items())
    for after_ms in range(0, stuck_ms + 1, 1000):
        now_ms = recording.last_ms + after_ms
        apply(state, recording.states(now_ms))
        look = state.look(START_NS + int(now_ms * MS))
    assert look.verdict is not None
    assert look.verdict.kind == "hang"
    assert look.cost is not None
    assert look.cost.parts["stuck or failing"] == pytest.approx(4 * stuck_ms / 1e3, rel=0.1)
    assert sum(look.cost.parts.values()) == pytest.approx(look.cost.wall_seconds)


def test_no_step_no_cost() -> None:
    state = RunState("run")
    apply(state, record(Job(num_ranks=2, steps=10)).registrations())
    assert state.look(START_NS).cost is None
