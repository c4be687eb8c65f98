"""The replay: graph, recorded programs and what-ifs, measured with jobs that ran apart from it."""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np
import pytest

from rankscope.wire.chunk import encode_chunk
from rankscope_server.findings.policy import POLICY
from rankscope_server.replay import replay_table
from rankscope_server.replay.event_graph import CycleError, GraphBuilder
from rankscope_server.replay.recorded_program import NoReplay
from rankscope_server.replay.replay import Replay
from tests.analysis.replay_measures import share_of, slowdown_of
from tests.analysis.simulator import Item, spoil
from tests.analysis.timeline import (
    Act,
    Timeline,
    attempt_of,
    data_parallel,
    groups_of,
    noisy,
    pipeline,
)


def replay_of(items: Sequence[Item]) -> Replay:
    state = attempt_of(items)
    return state.replays.newest(state.steps, state.ranks, state.groups, POLICY)[0]


def ddp_job(seed: int, slow: int = -1, size: float = 0.0, steps: int = 48) -> Timeline:
    chance = random.Random(seed)
    ranks = chance.choice([4, 6, 8])
    factor = noisy(seed, ranks, steps)
    if slow >= 0:
        factor[slow] *= 1 + size
    buckets, transfer = chance.randint(1, 6), chance.uniform(1, 20)
    program = data_parallel(
        chance.uniform(10, 40), chance.uniform(20, 80), buckets, transfer,
        lambda rank, step: factor[rank, step],
    )  # fmt: skip
    return Timeline(ranks, steps, program, {"world": tuple(range(ranks))}).run()


def pipeline_job(
    seed: int, slow: int = -1, size: float = 0.0, steps: int = 40
) -> tuple[Timeline, list[int]]:
    chance = random.Random(seed)
    stages, replicas = chance.choice([2, 4]), chance.choice([2, 4])
    microbatches = chance.choice([4, 8])
    schedule = chance.choice(["gpipe", "1f1b"])
    factor = noisy(seed, stages * replicas, steps)
    if slow >= 0:
        factor[slow] *= 1 + size
    program = pipeline(
        stages, microbatches, schedule, lambda rank, step: 5 * factor[rank, step],
        chance.uniform(0.1, 2), replicas,
    )  # fmt: skip
    job = Timeline(stages * replicas, steps, program, groups_of(stages, replicas)).run()
    return job, [rank % stages for rank in range(stages * replicas)]


# --- graph ---------------------------------------------------------------------------------------


def test_a_transfer_waits_for_its_last_member_and_holds_who_joins_it() -> None:
    builder = GraphBuilder(2)
    first, second = builder.work(0), builder.work(1)
    for rank in (0, 1):
        builder.issue(rank, "reduce")
    hidden = builder.work(0)
    for rank in (0, 1):
        builder.join(rank, "reduce")
    after = [builder.work(rank) for rank in (0, 1)]
    graph = builder.build()
    durations = np.zeros((graph.num_nodes, 1))
    durations[[first, second, hidden], 0] = 10, 30, 15
    durations[builder.transfers["reduce"], 0] = 5
    durations[after, 0] = 1, 2
    assert graph.ends(durations, np.zeros((2, 1)))[:, 0].tolist() == [36, 37]
    durations[hidden, 0] = 50
    assert graph.ends(durations, np.zeros((2, 1)))[:, 0].tolist() == [61, 37]


def test_operations_that_wait_for_each_other_are_an_error() -> None:
    builder = GraphBuilder(2)
    for rank, order in ((0, "ab"), (1, "ba")):
        for name in order:
            builder.issue(rank, name)
            builder.join(rank, name)
            builder.work(rank)
    with pytest.raises(CycleError):
        builder.build()


def test_many_columns_are_many_runs() -> None:
    replay = replay_of(ddp_job(0).items())
    start = np.zeros((replay.graph.num_ranks, replay.recorded.shape[1]))
    together = replay.graph.ends(replay.recorded, start)
    alone = [
        replay.graph.ends(replay.recorded[:, at], start[:, at]) for at in range(start.shape[1])
    ]
    assert np.allclose(together, np.stack(alone, axis=1))


# --- validation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_recorded_steps_are_given_back_whatever_the_clocks_say(seed: int) -> None:
    assert abs(replay_of(ddp_job(seed).items(clock_error_ms=500, hosts=2)).error_ratio()) < 1e-4
    job, stages = pipeline_job(seed)
    replay = replay_of(job.items(stages=stages, clock_error_ms=500, hosts=2))
    assert abs(replay.error_ratio()) < 1e-4


def test_lost_doubled_and_shuffled_chunks_change_little() -> None:
    def ratio(items: Sequence[Item]) -> float:
        replay = replay_of(items)
        return replay.step_without_ms([replay.ranks.index(1)]) / replay.mean_step_ms()

    for seed in range(5):
        items = ddp_job(seed, slow=1, size=0.5).items(per_chunk=4)
        whole = ratio(items)
        assert replay_of(spoil(items, seed, lost=0.05)).missing_share > 0
        assert ratio(spoil(items, seed, lost=0.05)) == pytest.approx(whole, abs=0.02)
        assert ratio(spoil(items, seed, lost=0.0)) == pytest.approx(whole, abs=1e-9)


def test_relabelled_shifted_and_scaled_jobs_give_the_same_ratio() -> None:
    steps, ranks = 40, 8
    factor = noisy(7, ranks, steps)
    factor[2] *= 1.4
    order = list(np.random.default_rng(0).permutation(ranks))

    def ratio(scale: float, rows: Sequence[int], slow: int, clock: float) -> float:
        program = data_parallel(
            30 * scale, 60 * scale, 4, 8 * scale, lambda rank, step: factor[rows[rank], step]
        )
        job = Timeline(ranks, steps, program, {"world": tuple(range(ranks))}).run()
        replay = replay_of(job.items(clock_error_ms=clock, hosts=4))
        return replay.mean_step_ms() / replay.step_without_ms([slow])

    plain = ratio(1.0, range(ranks), 2, 0.0)
    assert ratio(1.0, order, order.index(2), 0.0) == pytest.approx(plain, abs=1e-6)
    assert ratio(1.0, range(ranks), 2, 900.0) == pytest.approx(plain, abs=1e-4)
    assert ratio(20.0, range(ranks), 2, 0.0) == pytest.approx(plain, abs=0.01)


def without_waits(items: Sequence[Item]) -> list[Item]:
    """Return items in which no collective says for how long it was waited for."""
    found = []
    for arrival, what in items:
        if isinstance(what, tuple) and what[0].kind == "collectives":
            columns = {**what[1], "blocked_ns": np.zeros(len(what[1]["step"]), np.int64)}
            what = msgspec.structs.replace(what[0], data=encode_chunk(columns)), columns
        found.append((arrival, what))
    return found


def test_what_cannot_be_replayed_says_why() -> None:
    def reason(items: Sequence[Item]) -> str:
        with pytest.raises(NoReplay) as error:
            replay_of(items)
        return str(error.value)

    job = ddp_job(1)
    items = job.items()
    steps_only = [i for i in items if not isinstance(i[1], tuple) or i[1][0].kind == "steps"]
    assert reason(steps_only) == "no collectives are recorded"
    silent = [
        i
        for i in items
        if not isinstance(i[1], tuple) or i[1][0].kind == "steps" or i[1][0].rank != 2
    ]
    assert reason(silent) == "no collectives of rank 2 are known"
    assert "of the time for which ranks were blocked" in reason(without_waits(items))
    restless = random.Random(0)

    def program(rank: int, step: int) -> list[Act]:
        count = random.Random(step).randint(1, 9)
        acts = [Act("compute", 10 + restless.random())]
        return [*acts, *(Act("issue", 1.0) for _ in range(count)), Act("wait")]

    job = Timeline(4, 40, program, {"world": (0, 1, 2, 3)}).run()
    assert reason(job.items()) == "steps differ in their collectives"


def test_a_replay_that_failed_keeps_nothing_of_what_it_read() -> None:
    state = attempt_of(without_waits(ddp_job(1, steps=128).items()))
    newest = partial(state.replays.newest, state.steps, state.ranks, state.groups, POLICY)
    with pytest.raises(NoReplay, match="of the time for which"):
        newest()
    gc.collect()
    tracemalloc.start()
    with pytest.raises(NoReplay):
        newest()
    state.replays._kept.clear()
    with pytest.raises(NoReplay):
        newest()
    gc.collect()
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held_bytes < 20_000


def until(last: int, items: Sequence[Item]) -> list[Item]:
    """Return what a timeline of chunks of one step sends up to a step."""
    return [
        item for item in items
        if not isinstance(item[1], tuple) or np.asarray(item[1][1]["step"])[0] <= last
    ]  # fmt: skip


def test_what_was_made_of_all_rows_holds_when_some_have_to_go() -> None:
    """A thousand ranks fill the table with fewer steps than lie between two replays."""
    state = attempt_of(ddp_job(1, steps=128).items())
    newest = partial(state.replays.newest, state.steps, state.ranks, state.groups, POLICY)
    before, _ = newest()
    events = state.replays.events
    rows = events.count(before.steps)
    events._capacity = 1
    events._drop()
    assert events.count(before.steps) < rows
    assert newest()[0] is before


def test_a_large_block_waits_until_the_look_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_table, "_LARGE_ROWS", 1)
    items = ddp_job(1, steps=128).items(per_chunk=1)
    state = attempt_of(until(64, items))
    newest = partial(state.replays.newest, state.steps, state.ranks, state.groups, POLICY)
    state.replays.defers = True
    before, _ = newest()  # the first of all is made at once
    assert before.steps[-1] == 64
    for _, what in items:  # twice is once
        if isinstance(what, tuple):
            state.apply_chunk(*what)
    state.take_waiting()
    assert newest()[0] is before
    (what,) = state.replays.take_deferred()
    assert newest()[0] is before
    assert not state.replays.take_deferred()  # it is under way
    state.replays.adopt(what, what.make())
    after = newest()[0]
    assert after.steps[-1] == 128
    assert after.mean_step_ms() == replay_of(items).mean_step_ms()


def test_large_blocks_are_gone_through_after_each_doubling_and_then_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay_table, "_LARGE_ROWS", 1)
    monkeypatch.setattr(replay_table, "_MOST_BLOCKS", 4)
    items = ddp_job(1, steps=400).items(per_chunk=1)
    state, ends = attempt_of(until(0, items)), []
    for _, what in items:
        if isinstance(what, tuple):
            state.apply_chunk(*what)
            state.take_waiting()
            num_steps = state.steps.num_steps
            ends.append(num_steps - num_steps % state.replays.paced(8, 32, state.steps))
    assert list(dict.fromkeys(ends)) == [0, 32, 64, 128, 256, 384]


# --- what-ifs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_the_cost_of_a_slow_rank_is_that_of_the_job_without_it(seed: int) -> None:
    size = random.Random(seed).uniform(0.1, 1.0)
    slow, healthy = ddp_job(seed, 1, size), ddp_job(seed)
    replay = replay_of(slow.items())
    cost = 1 - replay.step_without_ms([1]) / replay.mean_step_ms()
    assert cost == pytest.approx(1 - healthy.step_ms() / slow.step_ms(), abs=0.02)
    slow_job, stages = pipeline_job(seed, 1, size)
    replay = replay_of(slow_job.items(stages=stages))
    cost = 1 - replay.step_without_ms([1]) / replay.mean_step_ms()
    truth = 1 - pipeline_job(seed)[0].step_ms() / slow_job.step_ms()
    assert cost == pytest.approx(truth, abs=0.02)


def test_measures_of_a_slow_rank() -> None:
    replay = replay_of(ddp_job(4, slow=2, size=0.8).items())
    assert replay.slowest_ranks() == [2]
    assert replay.slowdown() > 1.3
    assert slowdown_of(replay, replay.of_ranks([2])) == pytest.approx(replay.slowdown(), rel=0.05)
    assert slowdown_of(replay, replay.of_ranks([0])) < 1.05
    assert share_of(replay, replay.of_ranks(replay.slowest_ranks())) > 0.85


def test_two_thousand_steps_of_a_thousand_ranks_take_seconds() -> None:
    ranks, steps, buckets = 1024, 2000, 2
    builder = GraphBuilder(ranks)
    for rank in range(ranks):
        for bucket in range(buckets):
            builder.work(rank)
            builder.issue(rank, bucket)
        for bucket in range(buckets):
            builder.join(rank, bucket)
        builder.work(rank)
    graph = builder.build()
    replay = Replay(
        graph=graph,
        recorded=np.random.default_rng(0).lognormal(2, 0.05, (graph.num_nodes, steps)),
        kind=np.zeros(graph.num_nodes, np.int64),
        kinds=("work",),
        stage=np.zeros(ranks, np.int64),
        step_ms=np.ones(steps),
    )
    began = time.process_time()
    assert replay.mean_step_ms() > 0
    assert time.process_time() - began < 10
