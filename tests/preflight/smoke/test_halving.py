"""The slow member is found among any number of nodes."""

from __future__ import annotations

import itertools

import pytest

from rankscope.preflight.checks.base import CheckFinding, Run
from rankscope.preflight.checks.collective import CollPair
from rankscope.preflight.collective.halving import search
from rankscope.preflight.facts.smoke import SmokeFacts, SmokeHalf
from rankscope.preflight.model import Facts, NodeReport

SIZE = 4 * 2**20


def measured(num_nodes: int, slow: int | None) -> list[tuple[tuple[int, ...], float]]:
    """Search where one node is ten times slower than the others; None: no such node."""

    def measure(group: tuple[int, ...]) -> float:
        seconds = 0.02 * 2 * (len(group) - 1) / len(group)
        return seconds * 10 if slow in group else seconds

    return search(num_nodes, SIZE, measure)


def accused(num_nodes: int, groups: list[tuple[tuple[int, ...], float]]) -> list[CheckFinding]:
    """Return what the check says of these measurements."""
    names = [f"n{rank}" for rank in range(num_nodes)]
    halves = tuple(
        SmokeHalf(nodes=tuple(names[r] for r in group), size_bytes=SIZE, elapsed_ms=s * 1e3)
        for group, s in groups
    )
    facts = Facts(smoke=SmokeFacts(backend="gloo", stage="done", halves=halves))
    reports = {name: NodeReport(node=name, facts=facts) for name in names}
    return list(CollPair().evaluate(Run("7", tuple(names), reports)))


@pytest.mark.parametrize("num_nodes", [3, 4, 5, 7, 8, 16, 33])
def test_every_slow_node_is_found_and_no_other(num_nodes: int) -> None:
    for slow in range(num_nodes):
        groups = measured(num_nodes, slow)
        assert len(groups) <= 2 * num_nodes.bit_length() + 1
        assert all(len(group) > 1 for group, _ in groups)
        (found,) = accused(num_nodes, groups)
        assert found.nodes == (f"n{slow}",)


@pytest.mark.parametrize(
    ("num_nodes", "busy"), [(3, 0), (3, 1), (3, 2), (4, 0), (4, 1), (8, 0), (8, 1)]
)
def test_a_machine_that_is_busy_during_one_measurement_is_not_slow(
    num_nodes: int, busy: int
) -> None:
    turns = itertools.count()

    def measure(group: tuple[int, ...]) -> float:
        seconds = 0.02 * 2 * (len(group) - 1) / len(group)
        return seconds * 10 if next(turns) == busy else seconds

    assert accused(num_nodes, search(num_nodes, SIZE, measure)) == []


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_one_and_two_nodes_have_no_halves(num_nodes: int) -> None:
    assert measured(num_nodes, 0) == []


def test_equal_halves_end_the_search() -> None:
    assert len(measured(8, None)) == 2
