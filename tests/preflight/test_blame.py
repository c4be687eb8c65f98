from __future__ import annotations

import itertools

import pytest

from rankscope.preflight.checks.blame import Path, blame


def all_paths(num: int) -> list[Path]:
    return list(itertools.permutations(range(num), 2))


def said(
    bad: list[Path], tested: list[Path], **fields: object
) -> list[tuple[str, tuple[str, ...]]]:
    return [(one.side, one.nodes) for one in blame(bad, tested, **fields)]


@pytest.mark.parametrize("num", [3, 5, 40])
def test_sides(num: int) -> None:
    paths = all_paths(num)
    assert said([p for p in paths if p[1] == 1], paths) == [("inbound", (1,))]
    assert said([p for p in paths if p[0] == 1], paths) == [("outbound", (1,))]
    assert said([p for p in paths if 1 in p], paths) == [("both", (1,))]
    assert said([], paths) == []
    assert said(paths, paths) == [("everywhere", ())]


def test_one_path_is_a_pair_and_so_are_both_ways() -> None:
    paths = all_paths(4)
    assert said([(0, 1)], paths) == [("pair", ())]
    assert said([(0, 1), (1, 0), (2, 3)], paths) == [("pair", ()), ("pair", ())]


def test_one_end_of_all_that_was_tested() -> None:
    assert said([(1, 0), (2, 0)], [(1, 0), (2, 0)]) == [("inbound", (0,))]


def test_some_sources_of_one_node() -> None:
    found = blame([(2, 0), (3, 0)], all_paths(5))
    assert [(one.side, one.nodes, one.is_whole) for one in found] == [("inbound", (0,), False)]
    assert said([(2, 0), (3, 0)], all_paths(5), partly=False) == [("pair", ()), ("pair", ())]


def test_two_against_two_is_a_tie() -> None:
    bad = [(2, 0), (3, 0), (2, 1), (3, 1)]
    assert said(bad, all_paths(6)) == [("tie", ())]


def test_nodes_that_cover_each_other() -> None:
    paths = all_paths(3)
    bad = [path for path in paths if path[1] in (1, 2)]
    assert sorted(said(bad, paths)) == [("inbound", (1,)), ("inbound", (2,))]


def test_a_share_of_the_paths_is_enough_where_asked() -> None:
    paths = all_paths(5)
    bad = [path for path in paths if path[1] == 1 and path[0] != 4]
    assert said(bad, paths, share=0.5, partly=False) == [("inbound", (1,))]


def test_three_hundred_bad_nodes_of_a_thousand() -> None:
    paths = [(a, (a + step) % 1000) for a in range(1000) for step in range(-16, 17) if step]
    bad = [path for path in paths if path[0] % 3 == 0 or path[1] % 3 == 0]
    found = blame(bad, paths)
    assert {one.nodes for one in found} == {(node,) for node in range(0, 1000, 3)}
    assert {one.side for one in found} == {"both"}
