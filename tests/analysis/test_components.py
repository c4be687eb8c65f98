"""Slow NICs, hosts and leaves among 1,024 ranks: the right one or none, never a wrong one."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest

from rankscope_server.observe.components import Located, locate, ratios, slow_groups

DP, PP, TP, HOSTS_PER_LEAF = 16, 8, 8, 8


def rank_of(dp: int, pp: int, tp: int, order: str) -> int:
    if order == "dp-outer":
        return (dp * PP + pp) * TP + tp
    return (pp * DP + dp) * TP + tp


def layout(order: str) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Return the groups that cross hosts, and their kinds: data parallel, and pipeline pairs."""
    groups: dict[str, tuple[int, ...]] = {}
    kinds: dict[str, str] = {}
    for pp in range(PP):
        for tp in range(TP):
            name = f"dp-{pp}-{tp}"
            groups[name] = tuple(rank_of(dp, pp, tp, order) for dp in range(DP))
            kinds[name] = "dp"
    for dp in range(DP):
        for tp in range(TP):
            for pp in range(PP - 1):
                ends = (rank_of(dp, pp, tp, order), rank_of(dp, pp + 1, tp, order))
                for name, pair in ((f"f-{dp}-{tp}-{pp}", ends), (f"b-{dp}-{tp}-{pp}", ends[::-1])):
                    groups[name], kinds[name] = pair, "p2p"
    return groups, kinds


def components(groups: dict[str, tuple[int, ...]]) -> tuple[dict[str, set[str]], dict[str, int]]:
    crossed: dict[str, set[str]] = defaultdict(set)
    size: dict[str, int] = {}
    for name, ranks in groups.items():
        for rank in ranks:
            host = rank // TP
            for component, count in (
                (f"nic-{host}-{rank % TP}", 1),
                (f"host-{host}", TP),
                (f"leaf-{host // HOSTS_PER_LEAF}", TP * HOSTS_PER_LEAF),
            ):
                crossed[component].add(name)
                size[component] = count
    return dict(crossed), size


def verdict(
    seed: int, noise: float, order: str, bad: str | None, factor: float, operations: int = 30
) -> Located:
    chance = np.random.default_rng(seed)
    groups, kinds = layout(order)
    crossed, size = components(groups)
    slow_ones = crossed[bad] if bad else set()
    times = {}
    for name in groups:
        base = 10.0 if kinds[name] == "dp" else 1.0
        values = base * np.exp(noise * chance.normal(size=operations))
        values[0] *= 3  # warm-up
        times[name] = values * (factor if name in slow_ones else 1.0)
    found = ratios(times, kinds)
    return locate(found, slow_groups(found, kinds), crossed, size, kinds)


def pick(kind: str, seed: int) -> str:
    chance = random.Random(seed)
    host = chance.randrange(DP * PP)
    return {
        "nic": f"nic-{host}-{chance.randrange(TP)}",
        "host": f"host-{host}",
        "leaf": f"leaf-{host // HOSTS_PER_LEAF}",
    }[kind]


@pytest.mark.parametrize("order", ["dp-outer", "pp-outer"])
@pytest.mark.parametrize("kind", ["nic", "host", "leaf"])
@pytest.mark.parametrize("factor", [2.0, 1.3])
def test_the_slow_component(order: str, kind: str, factor: float) -> None:
    for seed in range(4):
        bad = pick(kind, seed)
        found = verdict(seed, 0.05, order, bad, factor).found
        assert [one.component for one in found] == [bad], seed


@pytest.mark.parametrize(
    ("kind", "silent"), [("nic", set()), ("host", {2}), ("leaf", {0, 1, 3, 4, 5})]
)
def test_much_noise_makes_it_silent_not_wrong(kind: str, silent: set[int]) -> None:
    """`silent`: the draws in which a component that is 1.3 times slower is lost in the noise."""
    for seed in range(6):
        bad = pick(kind, seed)
        for factor, is_silent in ((1.3, seed in silent), (2.0, False)):
            found = verdict(seed, 0.15, "pp-outer", bad, factor).found
            assert [one.component for one in found] == [bad][is_silent:], (seed, factor)


def test_no_fault_is_quiet() -> None:
    for seed in range(12):
        for noise in (0.05, 0.15):
            assert verdict(seed, noise, "pp-outer", None, 1.0) == Located((), ())


def test_a_slow_first_trial_on_all_ranks_is_no_link() -> None:
    groups = {f"g{k}": [20.0, *([10.0] * 30)] for k in range(8)}
    kinds = dict.fromkeys(groups, "all_reduce")
    assert slow_groups(ratios(groups, kinds), kinds) == set()


def collided(seed: int, share: float, order: str) -> Located:
    """Return the verdict where flows that hash onto one path slow some groups here and there."""
    chance = np.random.default_rng(seed)
    groups, kinds = layout(order)
    crossed, size = components(groups)
    times = {}
    for name in groups:
        slow = 1.8 if chance.random() < share else 1.0
        times[name] = slow * np.exp(0.05 * chance.normal(size=30))
    found = ratios(times, kinds)
    return locate(found, slow_groups(found, kinds), crossed, size, kinds)


@pytest.mark.parametrize("share", [0.01, 0.05, 0.2])
def test_collisions_of_flows_name_no_part(share: float) -> None:
    for seed in range(3):
        assert collided(seed, share, ("pp-outer", "dp-outer")[seed % 2]).found == ()


def test_two_faults_are_both_found() -> None:
    chance = np.random.default_rng(1)
    groups, kinds = layout("pp-outer")
    crossed, size = components(groups)
    times = {}
    for name in groups:
        factor = 1.8 if name in crossed["host-3"] | crossed["host-77"] else 1.0
        times[name] = factor * np.exp(0.05 * chance.normal(size=30))
    found = ratios(times, kinds)
    result = locate(found, slow_groups(found, kinds), crossed, size, kinds)
    assert {one.component for one in result.found} <= {"host-3", "host-77"}


def test_when_half_of_all_is_slow_no_place_is_named() -> None:
    found = {f"g{k}": (0.5 if k < 6 else 0.0) for k in range(10)}
    slow = {name for name, value in found.items() if value > 0}
    result = locate(found, slow, {"host": slow}, {"host": 8}, dict.fromkeys(found, "dp"))
    assert result.found == ()
    assert "half" in result.why_silent


def test_components_that_fit_alike_are_not_named() -> None:
    found = {f"g{k}": (0.5 if k < 4 else 0.0) for k in range(12)}
    slow = {name for name, value in found.items() if value > 0}
    result = locate(
        found, slow, {"a": slow, "b": slow}, {"a": 8, "b": 8}, dict.fromkeys(found, "dp")
    )
    assert result.found == ()
    assert set(result.unexplained) == slow
