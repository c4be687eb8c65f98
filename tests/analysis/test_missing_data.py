"""A rank whose records are missing is not accused nor called healthy (see `missing`)."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope_server.analysis.state import RunState
from rankscope_server.diagnose.shared.gaps import Gap
from rankscope_server.verdict.answers import Look
from tests.analysis.missing import NAMES, Run, judged, look_at, run_named
from tests.analysis.records import registered
from tests.simulator.delivery import apply
from tests.simulator.dropping import Drop, Source
from tests.simulator.told import START_NS

DRAWS = 4  # of each kind of run; `benchmarks/missing_data.py` draws thousands
EVERY = frozenset(range(1, 1000))


@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_missing_accuses_nobody_and_is_not_called_health(name: str) -> None:
    cases = [judged(name, seed, run_seed=0) for seed in range(DRAWS)]
    assert [one for one in cases if one.wrong] == []


def last(run: Run, *drops: Drop) -> Look:
    return look_at(run, drops)[-1]


@pytest.mark.parametrize("name", ["ddp-8 clean", "pipeline-8 clean", "line-ddp-4 clean"])
def test_a_healthy_rank_without_waits_is_named_as_not_known(name: str) -> None:
    look = last(run_named(name, 0), Drop("waits", frozenset({1}), "all", EVERY))
    assert look.verdict is None
    assert look.answer.state == "unknown"
    assert "Rank 1: collectives, and for how long it waited, are not known" in look.answer.text
    assert look.answer.notes


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((5,), "Rank 5: where it is is not known"),
     ((4, 5), "Ranks 4 and 5: where they are is not known")],
)  # fmt: skip
def test_what_is_not_known_of_one_rank_is_said_of_one(ranks: tuple[int, ...], text: str) -> None:
    assert Gap(ranks, "where they are is", 1.0).text == text


def test_no_shortcut_for_a_rank_whose_collectives_are_unknown() -> None:
    run = run_named("ddp-8 slow_compute", 0)
    (slow,) = run.guilty
    assert last(run).verdict is not None
    look = last(run, Drop("calls", run.guilty, "all", EVERY))
    assert look.verdict is None
    assert f"Rank {slow} may be slow since step" in look.answer.text
    assert last(run, Drop("calls", frozenset({(slow + 1) % 8}), "all", EVERY)).verdict is not None


@pytest.mark.parametrize(
    "name",
    [
        f"{shape} {fault}"
        for shape in ("ddp-8", "pipeline-8", "small-ddp-4", "line-ddp-4")
        for fault in ("slow_compute", "slow_data", "hang", "crash")
        if f"{shape} {fault}" in NAMES  # in a timeline no rank hangs or crashes
    ],
)
def test_evenly_thinned_runs_are_judged_as_whole_ones(name: str) -> None:
    run = run_named(name, 0)
    thinned = frozenset(step for step in range(10, 200) if step % 4)
    look = last(run, Drop("whole", frozenset(range(run.num_ranks)), "every", thinned))
    assert look.verdict is not None
    assert set(look.verdict.ranks) == run.guilty
    assert any("single collectives are not recorded" in note for note in look.answer.notes)


@pytest.mark.parametrize(
    "name",
    [
        f"{shape} {fault}"
        for shape in ("ddp-8", "pipeline-8")
        for fault in ("slow_compute", "slow_data", "hang", "crash")
        if f"{shape} {fault}" in NAMES
    ],
)
def test_runs_without_waits_in_one_step_of_eight_are_judged_by_the_rest(name: str) -> None:
    run = run_named(name, 0)
    unseen = frozenset(range(11, 1000, 8))
    look = last(run, Drop("seen", frozenset(range(run.num_ranks)), "every", unseen))
    assert look.verdict is not None, [finding.what for finding in look.findings]
    assert set(look.verdict.ranks) == run.guilty


def test_a_long_step_whose_waits_are_unknown_accuses_nobody() -> None:
    """There a rank seems to have worked all the time that it waited."""
    run = run_named("ddp-8 clean", 0)
    for ranks in (frozenset(range(8)), frozenset({3})):
        look = last(run, Drop("seen", ranks, "every", frozenset(range(41, 1000, 2))))
        assert look.verdict is None
        assert not any(finding.severity != "info" for finding in look.findings)


@pytest.mark.parametrize("source", ["whole", "seen"])
def test_a_clean_thinned_run_is_healthy_and_says_that_it_is_thinned(source: Source) -> None:
    run = run_named("ddp-8 clean", 0)
    items = list(run.items)
    for rank in range(run.num_ranks):
        items.append((START_NS, schema.Event(
            attempt=0, rank=rank, time_ns=START_NS, name="thinning_changed", step=40,
            fields={"level": "3", "every": "4", "from_step": "40", "overhead_ratio": "0.0078",
                    "budget_ratio": "0.00500", "us_per_collective": "110.0", "source": "kernels"},
        )))  # fmt: skip
    thinned = frozenset(step for step in range(40, 200) if step % 4)
    run = dataclasses.replace(run, items=tuple(sorted(items, key=lambda item: item[0])))
    look = last(run, Drop(source, frozenset(range(run.num_ranks)), "every", thinned))
    assert look.answer.state == "healthy"
    (note,) = look.answer.notes
    assert note == (
        "One step in 4 is recorded whole, the others without their single collectives, since step "
        "40, to keep recording below 0.5 % of the training thread (it took 0.8 %); to record more, "
        "install a C++ compiler or raise RANKSCOPE_OVERHEAD_PERCENT"
    )
    assert note in look.answer.detail


def test_unequally_thinned_steps_are_not_compared() -> None:
    run = run_named("ddp-8 clean", 0)
    look = last(run, Drop("whole", frozenset({3}), "all", EVERY))
    assert look.answer.state == "unknown"
    assert "Rank 3: thinned in other steps than the rest" in look.answer.text


def test_ranks_without_any_collective_are_compared_as_before() -> None:
    """A program without process groups has no waits that could be missing."""
    state, steps = RunState("alone"), 90
    for rank in range(8):
        who = {"attempt": 0, "rank": rank, "time_ns": START_NS}
        apply(state, [(0, registered(**who, world_size=8, host="a"))])
        own = 500.0 * np.exp(np.random.default_rng(rank).normal(0, 0.02, steps))
        columns = {name: np.zeros(steps, np.int64) for name in schema.STEP_COLUMNS}
        columns["step"] = np.arange(1, steps + 1)
        columns["duration_ns"] = columns["forward_ns"] = (own * 1e6).astype(np.int64)
        columns["started_ns"] = START_NS + np.arange(steps) * 800_000_000
        chunk = schema.Chunk(
            kind="steps", attempt=0, rank=rank, host="a", count=steps, time_lo_ns=START_NS,
            time_hi_ns=int(columns["started_ns"][-1]), data=f"{rank}".encode(),
        )  # fmt: skip
        state.apply_chunk(chunk, dict(columns))
    look = state.look(START_NS + steps * 800_000_000)
    assert look.answer.notes == ()
    assert not look.findings
    (straggler,) = (detector for detector in look.detectors if detector.name == "straggler")
    assert (straggler.state, straggler.reason) == ("ran", "")


def test_the_order_of_arrival_changes_nothing() -> None:
    """What is hidden of a rank depends on its peers, whoever comes first."""
    run = run_named("ddp-8 slow_compute", 0)
    drop = Drop("waits", frozenset({1, 2}), "every", frozenset(range(5, 80, 3)))
    told = set()
    for seed in range(4):
        items = list(run.items)
        random.Random(seed).shuffle(items)
        look = last(dataclasses.replace(run, items=tuple(items)), drop)
        told.add((look.answer.text, look.verdict and look.verdict.ranks))
    assert len(told) == 1
