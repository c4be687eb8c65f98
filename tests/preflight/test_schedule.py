from __future__ import annotations

import itertools

import pytest

from rankscope.preflight.probe import schedule


def names(num: int) -> list[str]:
    return [f"node{number}" for number in range(num)]


@pytest.mark.parametrize("num", [1, 2, 3, 4, 7, 16, 64])
def test_rounds_are_matchings_that_play_every_pair_once(num: int) -> None:
    nodes = names(num)
    drawn = schedule.rounds(nodes, "7f3a")
    for one in drawn:
        busy = [node for pair in one for node in pair]
        assert len(busy) == len(set(busy))
    played = [frozenset(pair) for one in drawn for pair in one]
    assert sorted(map(sorted, played)) == sorted(map(sorted, itertools.combinations(nodes, 2)))
    assert len(drawn) == (num - 1 if num % 2 == 0 else num if num > 1 else 0)


@pytest.mark.parametrize("num", [65, 100, 1000])
def test_many_nodes_play_eight_rounds_with_new_partners(num: int) -> None:
    drawn = schedule.rounds(names(num), "7f3a")
    assert [len(one) for one in drawn] == [num // 2] * 8
    played = {frozenset(pair) for one in drawn for pair in one}
    assert len(played) == 8 * (num // 2)
    assert drawn != schedule.rounds(names(num), "another")
    assert drawn == schedule.rounds(names(num), "7f3a")


def test_few_nodes_probe_everybody_after_them_first() -> None:
    assert schedule.pairs_of("node1", names(4), "x") == ("node2", "node3", "node0")
    assert schedule.pairs_of("node0", ["node0"], "x") == ()
    assert schedule.coverage(names(64)) == ""


@pytest.mark.parametrize("num", [65, 129, 1000])
def test_many_nodes_probe_rack_leaders_and_a_sample(num: int) -> None:
    nodes = names(num)
    peers = {node: set(schedule.pairs_of(node, nodes, "run")) for node in nodes}
    assert all(node in peers[peer] for node in nodes for peer in peers[node])
    assert all(node not in peers[node] for node in nodes)
    assert set(nodes[32:64]) - {"node40"} <= peers["node40"]
    assert set(nodes[::32]) - {"node32"} <= peers["node32"]
    assert all(32 <= len(some) <= 32 + 31 + num // 32 for some in peers.values())
    share = sum(map(len, peers.values())) / (num * (num - 1))
    told = float(schedule.coverage(nodes).split()[1]) / 100
    assert told == pytest.approx(share, abs=0.02)


def test_one_slow_node_plays_again_twice_with_fast_partners() -> None:
    mbit = {
        pair: 10.0 if "node3" in pair else 900.0 for pair in itertools.permutations(names(16), 2)
    }
    drawn = schedule.again(mbit)
    assert [len(one) for one in drawn] == [1, 1]
    assert all("node3" in pair for one in drawn for pair in one)
    assert len({frozenset(pair) for one in drawn for pair in one}) == 2


def test_only_what_is_slow_plays_again() -> None:
    mbit = dict.fromkeys(itertools.permutations(names(6), 2), 900.0)
    assert schedule.again(mbit) == []
    mbit["node1", "node2"] = mbit["node4", "node5"] = 200.0
    assert schedule.again(mbit) == [[("node1", "node2"), ("node4", "node5")]]
    assert schedule.slow_pairs(mbit) == [("node1", "node2"), ("node4", "node5")]
    assert schedule.again({pair: 900.0 for pair in mbit}, expect_mbit_per_s=800.0) == []
    assert len(schedule.slow_pairs(mbit, expect_mbit_per_s=1000.0)) == 30


@pytest.mark.parametrize("num", [3, 4, 5])
def test_one_slow_node_among_few_does_not_make_the_rest_unusual(num: int) -> None:
    mbit = {p: 10.0 if "node1" in p else 900.0 for p in itertools.permutations(names(num), 2)}
    assert schedule.usual(mbit) == 900.0
    assert all("node1" in pair for pair in schedule.slow_pairs(mbit))


def test_a_single_good_pair_is_a_weak_measure() -> None:
    mbit = {p: 3000.0 if "node1" in p else 12000.0 for p in itertools.permutations(names(3), 2)}
    assert schedule.slow_pairs(mbit) == []
    mbit["node1", "node0"] = 12000.0  # now two pairs are good one way at least
    assert schedule.slow_pairs(mbit) == [
        ("node0", "node1"), ("node1", "node2"), ("node2", "node1"),
    ]  # fmt: skip


def test_two_nodes_are_no_comparison() -> None:
    assert schedule.slow_pairs({("a", "b"): 10.0, ("b", "a"): 900.0}) == []
    assert schedule.slow_pairs({("a", "b"): 10.0}, expect_mbit_per_s=100.0) == [("a", "b")]
