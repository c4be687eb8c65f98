"""Ranks that stall now and then: named by counts and measured pauses, silent on a noisy host."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope_server.analysis.state import RunState
from rankscope_server.diagnose.stalls.detector import Work, _since_before, _stalling
from rankscope_server.diagnose.stalls.words import Stalling
from rankscope_server.findings.finding import Finding
from rankscope_server.findings.policy import Policy
from tests.analysis.simulator import START_NS
from tests.analysis.stalling import STEPS, Shape, look_at


def findings(shape: Shape, **more: Any) -> list[Finding]:
    """Return what is said of stalls, see `look_at`."""
    return [finding for finding in look_at(shape, **more).findings if finding.detector == "stalls"]


def nothing(_: np.random.Generator, rank: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(STEPS), np.zeros(STEPS)


def hiccups(chance: np.random.Generator, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Rank 2 stalls for 400 ms in one step in five, drawn at random, from step 61 on."""
    extra = np.where(chance.random(STEPS) < 0.2, 400.0, 0.0) * (rank == 2)
    extra[:60] = 0
    extra[60] = 400.0 * (rank == 2)
    return extra, np.zeros(STEPS)


def pauses(_: np.random.Generator, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Rank 3 is paused by its collector in every third step from step 76 on."""
    hit = (np.arange(STEPS) % 3 == 0) & (np.arange(STEPS) >= 75) & (rank == 3)
    return hit * 180.0, hit * 170.0


def pauses_of_all(_: np.random.Generator, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Every rank pauses in each eighth step, each in another one."""
    hit = np.arange(STEPS) % 8 == 2 * rank
    return hit * 300.0, hit * 300.0


@pytest.mark.parametrize("seed", range(10))
def test_a_rank_that_stalls_at_random_is_named(seed: int) -> None:
    (found,) = findings(hiccups, seed=seed)
    assert (found.kind, found.ranks, found.severity) == ("slow_compute", (2,), "critical")
    assert found.onset_step is not None
    assert 61 <= found.onset_step <= 75
    assert "one step in" in found.what
    assert found.cost_throughput_ratio == pytest.approx(0.37, abs=0.15)


@pytest.mark.parametrize("seed", range(10))
def test_a_few_long_stalls_are_named_among_many_small_ones_of_all(seed: int) -> None:
    """Each tenth step of rank 1 takes 600 ms longer; of any rank one in ten takes 80 ms longer."""

    def uneven(chance: np.random.Generator, rank: int) -> tuple[np.ndarray, np.ndarray]:
        small = np.where(chance.random(STEPS) < 0.1, 80.0, 0.0)
        long = (np.arange(STEPS) % 10 == 0) & (np.arange(STEPS) >= 60) & (rank == 1)
        return np.where(long, 600.0, small), np.zeros(STEPS)

    (found,) = findings(uneven, seed=seed, noise=0.1)
    assert (found.kind, found.ranks, found.severity) == ("slow_compute", (1,), "critical")
    assert found.onset_step == 61
    assert found.cost_throughput_ratio == pytest.approx(60 / 180, abs=0.08)


@pytest.mark.parametrize(
    ("ranks", "every", "extra_ms"), [(8, 100, 3000.0), (8, 200, 6000.0), (64, 100, 3000.0)]
)
def test_a_few_stalls_of_one_rank_are_named_where_each_is_long(
    ranks: int, every: int, extra_ms: float
) -> None:
    """Six or seven of them in the steps that are looked at: on one rank that is no chance."""
    steps = 1400
    hit = (np.arange(steps) >= 100) & (np.arange(steps) % every == every - 1)

    def rare(_: np.random.Generator, rank: int) -> tuple[np.ndarray, np.ndarray]:
        return np.where(hit & (rank == 0), extra_ms, 0.0), np.zeros(steps)

    (found,) = findings(rare, ranks=ranks, noise=0.05, steps=steps)
    assert (found.kind, found.ranks, found.severity) == ("slow_compute", (0,), "critical")
    numbers = np.flatnonzero(hit) + 1
    newest = numbers[numbers > steps - 512]
    assert found.onset_step == (newest[0] if len(newest) >= 6 else numbers[0])
    said = re.findall(r"stalls for ([\d,]+) ms in one step in (\d+) since", found.what)
    stalls_ms, one_in = said[0]
    assert float(stalls_ms.replace(",", "")) == pytest.approx(extra_ms, rel=0.01)
    assert float(one_in) == pytest.approx(every, rel=0.2)
    assert found.cost_throughput_ratio == pytest.approx(
        extra_ms / every / (extra_ms / every + 95), abs=0.06
    )


@pytest.mark.parametrize("seed", range(10))
def test_rare_long_stalls_of_any_rank_accuse_none(seed: int) -> None:
    """Each step in 25 one of 8 ranks, drawn at random, takes 3 s longer; or one for a minute."""
    chance, steps = np.random.default_rng(seed), 2000
    who = np.where(np.arange(steps) % 25 == 0, chance.integers(0, 8, steps), -1)
    minute = (np.arange(steps) % 10 == 0) & (np.abs(np.arange(steps) - 1200) < 35)

    def at_random(_: np.random.Generator, rank: int) -> tuple[np.ndarray, np.ndarray]:
        return np.where(who == rank, 3000.0, 0.0), np.zeros(steps)

    def once(_: np.random.Generator, rank: int) -> tuple[np.ndarray, np.ndarray]:
        return np.where(minute & (rank == seed % 8), 3000.0, 0.0), np.zeros(steps)

    for shape in (at_random, once):
        assert findings(shape, ranks=8, noise=0.05, steps=steps) == []


@pytest.mark.parametrize("seed", range(10))
def test_stalls_are_named_where_steps_were_thinned(seed: int) -> None:
    """One step in two is recorded from step 101 on: 90 of 140 since the stalls began."""
    steps = np.arange(STEPS)
    kept = (steps < 100) | (steps % 2 == 0)
    (found,) = findings(hiccups, seed=seed, noise=0.2, recorded=kept)
    assert (found.kind, found.ranks, found.severity) == ("slow_compute", (2,), "critical")


@pytest.mark.parametrize("seed", range(10))
def test_a_slow_rank_does_not_stall_in_the_steps_that_are_known(seed: int) -> None:
    """Rank 2 is slow in every step from 81 on; from 131 on one step in four is known."""
    steps = np.arange(800)

    def slow(_: np.random.Generator, rank: int) -> tuple[np.ndarray, np.ndarray]:
        return np.where(steps >= 80, 40.0, 0.0) * (rank == 2), np.zeros(800)

    unseen = (steps >= 130) & (steps % 4 != 0)
    assert findings(slow, seed=seed, noise=0.12, unseen=unseen, steps=800) == []


@pytest.mark.parametrize("seed", range(10))
def test_stalls_are_named_where_waits_of_thinned_steps_are_not_known(seed: int) -> None:
    steps = np.arange(STEPS)
    unseen = (steps >= 100) & (steps % 2 != 0)
    (found,) = findings(hiccups, seed=seed, noise=0.2, unseen=unseen)
    assert (found.kind, found.ranks, found.severity) == ("slow_compute", (2,), "critical")


@pytest.mark.parametrize("seed", range(20))
def test_bursts_of_other_work_are_no_finding(seed: int) -> None:
    """They take rank 0 to 1.6 times its usual work four times, for 5 to 12 steps."""

    def bursts(chance: np.random.Generator, rank: int) -> tuple[np.ndarray, np.ndarray]:
        extra = np.zeros(STEPS)
        for begin in chance.integers(0, STEPS, 4) if rank == 0 else ():
            extra[begin : begin + chance.integers(5, 13)] = 48.0
        return extra, np.zeros(STEPS)

    assert findings(bursts, seed=seed, noise=0.05) == []


@pytest.mark.parametrize("seed", range(10))
def test_collector_pauses_of_one_rank_are_called_so(seed: int) -> None:
    (found,) = findings(pauses, seed=seed)
    assert (found.kind, found.ranks) == ("garbage_collection", (3,))
    assert found.onset_step == 76
    assert found.confidence == 0.9


def test_pauses_that_fall_on_other_steps_on_each_rank_accuse_nobody() -> None:
    (found,) = findings(pauses_of_all)
    assert (found.kind, found.ranks) == ("garbage_collection", ())
    assert "all wait for each" in found.what


@pytest.mark.parametrize("seed", range(5))
def test_the_cost_is_a_share_of_the_step_with_what_all_wait_for(seed: int) -> None:
    """Work of 80 ms and transfers of 400: a pause of 15 ms on average is 3 % of the job's time."""

    def pauses_of_one(_: np.random.Generator, rank: int) -> tuple[np.ndarray, np.ndarray]:
        hit = (np.arange(STEPS) % 4 == 0) & (rank == 2)
        return hit * 60.0, hit * 60.0

    (found,) = findings(pauses_of_one, seed=seed, noise=0.02)
    assert found.cost_throughput_ratio == pytest.approx(15 / 100, rel=0.1)
    (found,) = findings(pauses_of_one, seed=seed, noise=0.02, sent_ms=400.0)
    assert found.cost_throughput_ratio == pytest.approx(15 / 495, rel=0.1)
    assert found.severity == "warning"


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.3, 0.6])
def test_healthy_ranks_are_left_alone(noise: float) -> None:
    assert [findings(nothing, seed=seed, noise=noise) for seed in range(20)] == [[]] * 20


def test_what_stalls_all_ranks_of_a_host_is_nobodys_fault() -> None:
    common = np.where(np.random.default_rng(7).random(STEPS) < 0.2, 400.0, 0.0)
    assert findings(lambda _, rank: (common, np.zeros(STEPS))) == []


def test_a_rank_that_is_slow_in_every_step_is_the_stragglers() -> None:
    def slow(_: np.random.Generator, rank: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full(STEPS, 120.0) * (rank == 1), np.zeros(STEPS)

    assert findings(slow) == []


def test_steps_that_are_long_on_both_ranks_are_the_stalls_of_neither() -> None:
    """A job that became slower, of two ranks whose first steps were long, not by the same.

    One rank is now about the level from which on a step is a stall, so every second one is; those
    of the other follow each other.
    """
    late, is_odd = np.arange(512) >= 340, np.arange(512) % 2 > 0
    own = np.where(late, np.where(is_odd, [[62.0], [63.0]], [[60.0], [63.0]]), 10.0)
    far = np.where(late, np.where(is_odd, [[0.5], [-0.4]], [[0.1], [-0.4]]), -1.0)
    work = Work(
        None, np.arange(512), own, np.zeros_like(own), far, own.max(axis=0),  # type: ignore[arg-type]
        {"replica": [0, 1]},
    )  # fmt: skip
    assert list(_stalling(work, Policy())) == []
    own[1] = 10.0
    assert [found.row for found in _stalling(work, Policy())] == [0]


@pytest.mark.parametrize(
    ("often", "share", "kind"),
    [(0.3, 0.3, "cpu_limit"), (0.3, 0.02, "slow_compute"), (0.45, 0.4, "cpu_limit")],
)
def test_stalls_of_a_rank_whose_container_has_used_up_its_processor_time(
    often: float, share: float, kind: str
) -> None:
    """So many of its steps may be held up that statistics no longer calls them stalls."""
    chance = np.random.default_rng(3)
    is_stall = chance.random(400) < often

    def shape(_: np.random.Generator, rank: int) -> tuple[np.ndarray, np.ndarray]:
        return np.where(is_stall & (rank == 1), 120.0, 0.0), np.zeros(400)

    def throttled(state: RunState) -> None:
        times = START_NS + np.arange(100) * 10**9
        columns: dict[str, Any] = {
            name: np.zeros(100, np.int64) for name in schema.CHUNK_COLUMNS["process"]
        }
        columns |= {"time_ns": times, "rank": np.ones(100, np.int64)}
        columns["throttled_us_total"] = (np.arange(100) * share * 1e6).astype(np.int64)
        columns["cpu_limit_millicores"] = np.full(100, 400)
        state.apply_chunk(
            schema.Chunk(
                kind="process", attempt=0, rank=schema.NODE_RANK, host="node-0", count=100,
                time_lo_ns=int(times[0]), time_hi_ns=int(times[-1]), data=b"samples",
            ),
            columns,
        )  # fmt: skip

    (found,) = findings(shape, noise=0.05, steps=400, beside=throttled)
    assert (found.kind, found.ranks) == (kind, (1,))
    assert ("0.4 processors" in found.why) == (kind == "cpu_limit")


@pytest.mark.parametrize(("extra_ms", "ranks"), [(80.0, set()), (500.0, {1})])
def test_what_is_a_usual_step_of_the_other_rank_is_no_stall(
    extra_ms: float, ranks: set[int]
) -> None:
    """Of two ranks one began while something else ran: its reference is that of slow steps."""

    def shape(chance: np.random.Generator, rank: int) -> tuple[np.ndarray, np.ndarray]:
        held_up = chance.random(400) < 0.25
        extra = np.where(held_up, extra_ms if rank else 80.0, 0.0)
        extra[:60] = 0.0 if rank else 80.0
        return extra, np.zeros(400)

    found = findings(shape, ranks=2, noise=0.1, steps=400)
    assert {rank for one in found for rank in one.ranks} == ranks


def test_an_onset_stays_known_when_it_is_no_longer_among_the_newest_steps() -> None:
    case = Stalling(
        rank=1, onset_step=900, last_step=1_400, is_over=False, num_stalls=90, num_steps=500,
        most_of_others=0, usual_ms=10.0, extra_ms=50.0, pause_ms=0.0, phase="forward", cost=0.2,
        severity="critical",
    )  # fmt: skip
    old: Any = SimpleNamespace(state="open", onset_step=386)
    window: Any = SimpleNamespace(attempt=0, before={"0/stalls/slow_compute/1": old})
    assert _since_before(window, case).onset_step == 386
    assert _since_before(window, replace(case, is_over=True)).onset_step == 900
    assert _since_before(window, replace(case, limit="its control group")).onset_step == 900
    old.state = "recovered"
    assert _since_before(window, case).onset_step == 900
