"""An agent that goes away is named by the others, soon; a path that is lost is no death."""

from __future__ import annotations

import pytest

from rankscope.preflight.checks.base import Run
from rankscope.preflight.exchange.reports import Exchange
from rankscope.preflight.model import Gone, NodeReport, gone_nodes
from rankscope.preflight.verdict.engine import evaluate, exit_code
from tests.preflight.deaths import End, die

MOST_S = 15.0
NODES = ("node0", "node1", "node2")


@pytest.mark.multiproc
@pytest.mark.laboratory
@pytest.mark.needs("namespaces")
@pytest.mark.parametrize(
    ("end", "victim", "after_s"), [("kill", 1, 0.5), ("stop", 0, 2.0), ("ctrl-c", 2, 1.5)]
)
def test_the_others_name_it_and_nothing_is_left(end: End, victim: int, after_s: float) -> None:
    death = die(end, victim, after_s, options=("--skip", "collective"))
    assert not death.wrong(2 * MOST_S), death  # a shared machine of two processors


def report(node: str, *gone: str, heard: tuple[str, ...] = NODES, **fields: object) -> NodeReport:
    base = {"stage": "pairs", "heard": tuple(name for name in heard if name != node)} | fields
    lost = {name: Gone(how="closed", stage="pairs", after_s=3.0) for name in gone}
    return NodeReport(node=node, gone=lost, **base)  # type: ignore[arg-type]


def gone(*reports: NodeReport) -> dict[str, Gone]:
    return gone_nodes({report.node: report for report in reports})


def test_most_of_those_that_heard_it_must_say_so() -> None:
    dead = report("node2")
    assert set(gone(report("node0", "node2"), report("node1", "node2"), dead)) == {"node2"}
    assert not gone(report("node0", "node2"), report("node1"), dead)
    deaf = report("node1", heard=("node0",))  # it never heard node2: no voice in this
    assert set(gone(report("node0", "node2"), deaf, dead)) == {"node2"}


def test_one_voice_waits_for_the_others_before_it_answers() -> None:
    """Else it would give an answer without the death, and with what came of it."""
    exchange = Exchange(report("node0", "node2"))
    for other in (report("node1"), report("node2")):
        exchange.add(other)
    assert not exchange.is_agreed()
    exchange.add(report("node1", "node2", version=9))
    assert exchange.is_agreed()


def test_who_is_heard_to_end_after_all_is_no_question() -> None:
    exchange = Exchange(report("node0", "node2"))
    for other in (report("node1"), report("node2", stage="done")):
        exchange.add(other)
    assert exchange.is_agreed()


def test_two_that_lost_each_other_are_both_there() -> None:
    assert not gone(report("node0", "node1"), report("node1", "node0"), report("node2"))


def test_two_that_died_have_no_voice() -> None:
    found = gone(report("node0", "node1", "node2"), report("node1"), report("node2"))
    assert set(found) == {"node1", "node2"}


def test_who_had_ended_is_not_missed() -> None:
    ended = report("node2", stage="done")
    assert not gone(report("node0", "node2"), report("node1", "node2"), ended)


def test_an_interrupted_agent_says_so_itself() -> None:
    found = gone(report("node0"), report("node1", is_leaving=True, stage="reached"))
    assert found == {"node1": Gone(how="left", stage="reached")}


def test_the_answer_is_incomplete_and_says_since_when() -> None:
    reports = [report("node0", "node1"), report("node1"), report("node2", "node1")]
    run = Run("r", NODES, {one.node: one for one in reports})
    verdict = evaluate(run)
    absent = [finding for finding in verdict.findings if finding.id == "node.absent"]
    assert [finding.nodes for finding in absent] == [("node1",)]
    assert "has died, while bandwidth was measured" in absent[0].title
    assert "node0: node1 closed its connections, 3 s after node0 began" in absent[0].lines
    assert exit_code(verdict) == 3
