"""Ranks that work unequally long are not called healthy, and no rank is accused by chance."""

from __future__ import annotations

import re

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope_server.analysis.state import RunState
from rankscope_server.findings.finding import Finding
from rankscope_server.verdict.answers import Look
from tests.analysis.records import grouped
from tests.analysis.simulator import HEAVY, MS, START_NS, Job, analyse, apply, record, say, wide


def work(num_ranks: int, num_steps: int, seed: int, sigma: float = 0.02) -> np.ndarray:
    """Return self times, ranks x steps, in ms: 100 with noise and hiccups."""
    chance = np.random.default_rng(seed)
    own_ms = 100 * np.exp(chance.normal(0, sigma, (num_ranks, num_steps)))
    return np.where(chance.random(own_ms.shape) < 0.003, 2 * own_ms, own_ms)


def look_at(own_ms: np.ndarray, tokens: np.ndarray | None = None) -> Look:
    """Return what is said of a run whose ranks are alive when all its steps have come."""
    num_ranks, num_steps = own_ms.shape
    state, last_ns = RunState("run"), START_NS + int((own_ms.max(0) + 2).sum() * MS)
    items = wide(own_ms)
    for _, what in items:
        if isinstance(what, tuple):
            what[1]["num_collectives"] = np.full(what[0].count, 3)
    apply(state, items)
    given = np.zeros((num_ranks, 0)) if tokens is None else tokens
    for rank in range(num_ranks):
        who = {"attempt": 0, "rank": rank, "time_ns": last_ns}
        state.apply_record(grouped(**who, ranks=range(num_ranks), group="world", backend=""))
        for step, count in enumerate(given[rank].tolist(), 1):
            state.apply_record(schema.Metrics(**who, step=step, values={"tokens": count}))
        at = schema.GroupState(group="world", issued=num_steps, ended=num_steps)
        state.apply_record(
            schema.RankState(
                **who, step=num_steps, phase="forward", phase_since_ns=last_ns,
                heartbeat_ns=last_ns, groups=[at],
            )
        )  # fmt: skip
    return state.look(last_ns)


def of_balance(look: Look) -> list[Finding]:
    return [finding for finding in look.findings if finding.detector == "balance"]


def saved(slow_ms: np.ndarray, even_ms: np.ndarray) -> float:
    """Return the share of the job's time that other work would save."""
    return float(1 - (even_ms.max(0) + 2).sum() / (slow_ms.max(0) + 2).sum())


@pytest.mark.parametrize(
    ("num_ranks", "slow"), [(3, (1, 2)), (4, (0, 2, 3)), (5, (0, 1, 2)), (40, tuple(range(24)))]
)
def test_most_of_a_role_that_was_always_slower_is_named_with_its_cost(
    num_ranks: int, slow: tuple[int, ...]
) -> None:
    even = work(num_ranks, 400, seed=1)
    own_ms = even.copy()
    own_ms[list(slow)] *= 1.3
    look = look_at(own_ms)
    (finding,) = of_balance(look)
    assert look.verdict is not None
    assert look.verdict.kind == "unequal_ranks"
    assert (finding.ranks, finding.onset_step, finding.severity) == (slow, 1, "critical")
    assert finding.cost_throughput_ratio == pytest.approx(saved(own_ms, even), abs=0.01)
    assert "1.3\N{MULTIPLICATION SIGN} slower than" in finding.what
    assert "since the first step" in finding.what
    assert "Other hardware, other work or a fault" in finding.why
    assert "without" not in finding.next  # to run without a host would rest on nothing


@pytest.mark.parametrize(("num_ranks", "more"), [(2, 0.15), (3, 0.1), (8, 0.075), (16, 0.075)])
def test_a_rank_that_was_always_a_little_slower_is_no_health(num_ranks: int, more: float) -> None:
    even = work(num_ranks, 400, seed=2)
    own_ms = even.copy()
    own_ms[1] *= 1 + more
    look = look_at(own_ms)
    (finding,) = of_balance(look)
    assert (finding.ranks, finding.severity) == ((1,), "info")
    assert finding.cost_throughput_ratio == pytest.approx(saved(own_ms, even), abs=0.01)
    assert look.answer.state == "unknown"
    assert look.answer.text.startswith("No verdict: ")


def test_after_some_minutes_little_is_accused_too() -> None:
    """Other work on a host has come and gone by then."""
    own_ms = work(2, 1500, seed=3)
    own_ms[1] *= 1.15
    look = look_at(own_ms)
    assert look.verdict is not None
    assert (look.verdict.kind, look.verdict.ranks) == ("unequal_ranks", (1,))
    assert "has been 15 % slower than rank 0 since the first step" in look.answer.text


def test_since_the_first_step_is_known_when_that_has_left_the_table() -> None:
    own_ms = work(3, 6000, seed=4)
    later = own_ms.copy()
    own_ms[1:] *= 1.3
    later[1:, 1000:] *= 1.3
    (finding,) = of_balance(look_at(own_ms))
    assert (finding.ranks, finding.onset_step) == ((1, 2), 1)
    assert not of_balance(look_at(later))


def test_more_tokens_are_said_as_such() -> None:
    own_ms = work(3, 400, seed=5)
    own_ms[1:] *= 1.3
    tokens = np.full((3, 400), 1000.0)
    tokens[1:] = 1300.0
    look = look_at(own_ms, tokens)
    (finding,) = of_balance(look)
    assert (finding.kind, finding.severity) == ("sequence_imbalance", "info")
    assert "were given 1.3\N{MULTIPLICATION SIGN} the tokens of rank 0" in finding.what
    assert look.answer.state == "advice"


@pytest.mark.parametrize("num_quick", [1, 2])
def test_few_that_have_less_to_do_accuse_no_rank(num_quick: int) -> None:
    own_ms = work(12, 400, seed=6)
    own_ms[:num_quick] *= 0.7
    look = look_at(own_ms)
    assert not of_balance(look)
    assert look.verdict is None


def test_who_slows_down_later_is_not_unequal_from_the_start() -> None:
    own_ms = work(3, 400, seed=7)
    own_ms[1:, 150:] *= 1.3
    assert not of_balance(look_at(own_ms))


@pytest.mark.parametrize(("num_ranks", "sigma"), [(2, 0.02), (4, 0.1), (8, 0.02), (64, 0.03)])
def test_equal_ranks_are_not_unequal_by_chance(num_ranks: int, sigma: float) -> None:
    """Each rank is a little quicker or slower than others for good, as real devices are."""
    for seed in range(6):
        chance = np.random.default_rng(seed + 100)
        own_ms = work(num_ranks, 300, seed, sigma)
        own_ms *= np.exp(chance.normal(0, 0.005, (num_ranks, 1)))
        look = look_at(own_ms)
        assert not [f for f in look.findings if f.kind == "unequal_ranks"], seed


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_noisy_host_makes_no_rank_unequal(num_ranks: int) -> None:
    """Bursts of other work, drift and hiccups."""
    found = []
    for seed in range(6):
        look = analyse(record(Job(num_ranks=num_ranks, seed=seed, noise=HEAVY)))
        found += [f.what for f in look.findings if f.kind == "unequal_ranks"]
    say(f"{num_ranks} ranks on a noisy host: {found}")
    assert not found


@pytest.mark.parametrize("how", ["each time another", "lengths", "jitter"])
def test_work_that_is_uneven_from_step_to_step_is_said_with_its_size(how: str) -> None:
    even = work(8, 600, seed=8)
    chance = np.random.default_rng(9)
    longer = {
        "each time another": np.where(np.arange(8)[:, None] == np.arange(600) % 8, 1.3, 1.0),
        "lengths": np.exp(chance.normal(0, 0.15, (8, 600))),
        "jitter": np.where(chance.random((8, 600)) < 0.1, 1.5, 1.0),
    }[how]
    own_ms = even * longer
    spread = even * longer.mean(axis=0)
    look = look_at(own_ms)
    assert look.verdict is None
    (finding,) = of_balance(look)
    assert (finding.kind, finding.ranks, finding.severity) == ("uneven_work", (), "info")
    assert finding.cost_throughput_ratio == pytest.approx(saved(own_ms, spread), abs=0.04)
    assert look.answer.state == "advice"
    assert "another one the longest each time" in look.answer.text


def test_the_headline_of_a_healthy_run_says_what_uneven_work_loses() -> None:
    """Too little for advice, as ranks of their own noise lose so much, and no nothing."""
    even = work(8, 600, seed=8)
    longer = np.where(np.arange(8)[:, None] == np.arange(600) % 8, 1.06, 1.0)
    look = look_at(even * longer)
    assert not of_balance(look)
    assert look.answer.state == "healthy"
    said = re.search(r"; all wait ([\d.]+) % of the time for the rank that", look.answer.text)
    assert said
    lost = saved(even * longer, even.mean(0, keepdims=True) * np.ones((8, 1)))
    assert float(said[1]) / 100 == pytest.approx(lost, abs=0.02)


@pytest.mark.parametrize(("num_ranks", "slow"), [(16, range(8, 16)), (8, range(4))])
def test_half_of_a_role_that_is_slow_on_and_off_is_no_health(num_ranks: int, slow: range) -> None:
    even = work(num_ranks, 1200, seed=10)
    own_ms = even.copy()
    is_slow = (np.arange(1200) >= 200) & (np.arange(1200) % 50 < 25)
    own_ms[np.ix_(slow, is_slow)] *= 1.4
    look = look_at(own_ms)
    (finding,) = of_balance(look)
    assert finding.kind == "uneven_work"
    assert finding.cost_throughput_ratio == pytest.approx(
        saved(own_ms[:, 688:], even[:, 688:]), abs=0.03
    )
    assert f"mostly one of ranks {slow[0]} to {slow[-1]} the longest" in finding.what
    assert look.answer.state == "advice"


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_ordinary_noise_is_health(num_ranks: int) -> None:
    look = look_at(work(num_ranks, 300, seed=11))
    assert not of_balance(look)
    assert look.answer.state == "healthy"


def test_a_slow_rank_makes_no_uneven_work_beside_it() -> None:
    own_ms = work(8, 400, seed=12)
    own_ms[3, 100:] *= 1.4
    look = look_at(own_ms)
    assert look.verdict is not None
    assert look.verdict.ranks == (3,)
    assert not of_balance(look)


def test_one_long_stop_is_no_uneven_work() -> None:
    own_ms = work(4, 400, seed=13)
    own_ms[2, 300] = 30_000.0
    assert not of_balance(look_at(own_ms))
