"""Jobs of two and three ranks, one of them slow from its first step on: no step before shows it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rankscope_server.diagnose.straggler.case import _ratios_text
from rankscope_server.findings.text import ratio_text
from rankscope_server.verdict.answers import Look
from tests.analysis.stalling import Shape, look_at

NOISE = 0.1


def slower(extra_ms: Mapping[int, float], since: int = 0) -> Shape:
    """Return what makes some ranks do so many ms more in each step from one on."""

    def shape(chance: np.random.Generator, rank: int) -> tuple[np.ndarray, np.ndarray]:
        extra = np.zeros(200)
        extra[since:] = extra_ms.get(rank, 0.0)
        return extra, np.zeros(200)

    return shape


def accused(look: Look) -> list[tuple[tuple[int, ...], str]]:
    return [
        (finding.ranks, finding.severity)
        for finding in look.findings
        if finding.kind == "slow_compute"
    ]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("extra_ms", [40.0, 160.0, 800.0])
def test_one_that_was_never_faster_is_named(ranks: int, extra_ms: float) -> None:
    look = look_at(slower({1: extra_ms}), ranks=ranks, noise=NOISE)
    (finding,) = (one for one in look.findings if one.kind == "slow_compute")
    assert (finding.ranks, finding.severity) == ((1,), "critical")
    assert look.verdict is not None
    assert look.verdict.key == finding.key
    peers = "peer" if ranks == 2 else "2 peers"
    found = re.search(rf"is ([\d.]+)\S slower than its {peers} since", finding.what)
    assert found is not None, finding.what
    assert float(found[1]) == pytest.approx((80 + extra_ms) / 80, rel=0.15)
    assert finding.onset_step is not None
    assert finding.onset_step <= 21  # the warm-up is not looked at
    expected = extra_ms / (80 + extra_ms + 5)
    assert finding.cost_throughput_ratio == pytest.approx(expected, rel=0.25)


def test_first_steps_that_were_disturbed_are_no_reference() -> None:
    """As long as something else ran on the host both were slow; since then one of them is."""

    def shape(chance: np.random.Generator, rank: int) -> tuple[np.ndarray, np.ndarray]:
        extra = np.where(np.arange(200) < 30, 240.0, 240.0 * (rank == 1))
        return extra, np.zeros(200)

    look = look_at(shape, ranks=2, noise=NOISE)
    assert ((1,), "critical") in accused(look)
    assert {ranks for ranks, _ in accused(look)} == {(1,)}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("noise", [0.05, 0.3])
def test_equal_ranks_are_healthy(ranks: int, noise: float) -> None:
    for seed in range(20):
        look = look_at(slower({}), ranks=ranks, noise=noise, seed=seed)
        assert [finding for finding in look.findings if finding.severity != "info"] == []
        assert accused(look) == []


def test_two_of_three_that_are_slow_accuse_nobody_alone() -> None:
    look = look_at(slower({0: 100.0, 1: 100.0}), ranks=3, noise=NOISE)
    assert accused(look) == []


def test_a_small_change_of_the_rank_that_waits_hides_nothing() -> None:
    def shape(chance: np.random.Generator, rank: int) -> tuple[np.ndarray, np.ndarray]:
        extra = np.full(200, 160.0) if rank else np.where(np.arange(200) < 120, 0.0, 12.0)
        return extra, np.zeros(200)

    look = look_at(shape, ranks=2, noise=0.02)
    assert ((1,), "critical") in accused(look)
    assert {ranks for ranks, severity in accused(look) if severity != "info"} == {(1,)}


@pytest.mark.parametrize("extra_ms", [(60.0, 55.0), (80.0, 70.0)])
def test_one_that_became_slower_and_works_no_longer_than_the_other_is_not_named(
    extra_ms: tuple[float, float],
) -> None:
    """Rank 0 has always had more to do, and its first steps were disturbed."""

    def shape(chance: np.random.Generator, rank: int) -> tuple[np.ndarray, np.ndarray]:
        late, first = np.arange(200) >= 100, np.arange(200) < 30
        extra = extra_ms[0] + 100.0 * first if rank == 0 else extra_ms[1] * late
        return extra, np.zeros(200)

    for seed in range(4):
        look = look_at(shape, ranks=2, noise=NOISE * 3, seed=seed)
        assert [one for one in accused(look) if one[1] != "info" and one[0] == (1,)] == []


def test_ranks_that_do_not_wait_for_each_other_cost_nothing() -> None:
    look = look_at(slower({1: 160.0}), ranks=2, noise=NOISE, waits=False)
    assert accused(look) == []


def test_a_learner_beside_an_actor_is_not_compared_with_it() -> None:
    assert accused(look_at(slower({1: 160.0}), ranks=2, noise=NOISE, learners=(0, 1))) != []
    assert accused(look_at(slower({1: 160.0}), ranks=2, noise=NOISE, learners=(1,))) == []


def test_one_that_became_slow_later_is_still_compared_with_its_steps_before() -> None:
    look = look_at(slower({1: 160.0}, since=100), ranks=2, noise=NOISE)
    (finding,) = (one for one in look.findings if one.kind == "slow_compute")
    assert "slower than before since step 101" in finding.what


def test_several_slow_ranks_have_a_figure_each_where_these_differ() -> None:
    def case(ratios: dict[int, float]) -> Any:
        return SimpleNamespace(ranks=tuple(ratios), ratios=ratios, ratio=max(ratios.values()))

    assert _ratios_text(case({1: 4.0, 2: 7.1})) == f"{ratio_text(4.0)} and {ratio_text(7.1)}"
    assert _ratios_text(case({1: 2.0, 2: 2.3})) == ratio_text(2.3)
    assert _ratios_text(case({3: 2.3})) == ratio_text(2.3)
    assert _ratios_text(case({rank: 1.5 + rank for rank in range(6)})) == ratio_text(6.5)
