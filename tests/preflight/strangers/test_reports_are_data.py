"""A node that says what it likes can make nobody else run, see or wait for anything."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Iterator
from xml.etree import ElementTree

import msgspec
import pytest
from rich.console import Console

from rankscope.preflight.checks import CHECKS
from rankscope.preflight.checks.base import Run
from rankscope.preflight.checks.commands import command, word
from rankscope.preflight.exchange.intake import MOST_TEXT, Intake, RefusedReportError
from rankscope.preflight.exchange.reports import Exchange
from rankscope.preflight.facts.edges import EdgeFacts
from rankscope.preflight.model import CheckFinding, Fix, Listening, NodeReport
from rankscope.preflight.report import junit, page, screen, stored
from rankscope.preflight.report.summary import Summary, summarise
from rankscope.preflight.verdict.engine import evaluate
from tests.preflight.healthy import NODES, healthy
from tests.preflight.strangers.hostile import ATTEMPTS, MARK, Forger, active, is_acting

NUM_RUNS = 120
WITH_COMMANDS = 55  # of the checks: that many were made to print one, so the property is tried


def forged() -> Iterator[Run]:
    for seed in range(NUM_RUNS):
        yield Forger(seed, NODES).run()


def test_no_command_of_any_check_holds_a_text_that_a_shell_would_act_on() -> None:
    tried = set()
    for run in forged():
        for check in CHECKS:
            for fix in (fix for finding in findings(check, run) for fix in finding.fix):
                tried.add(check.id)
                assert MARK not in active(fix.command), (check.id, fix.command)
                assert not any(map(is_acting, fix.command)), (check.id, fix.command)
    assert len(tried) >= WITH_COMMANDS


def findings(check: object, run: Run) -> list[CheckFinding]:
    try:
        return list(check.evaluate(run))  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001 - the engine makes `unknown` of it
        return []


def summaries() -> Iterator[Summary]:
    for seed in range(12):
        run = Forger(seed, NODES).run()
        yield summarise(evaluate(run), run)


def test_nothing_on_the_screen_moves_the_cursor_or_is_markup() -> None:
    seen = ""
    for summary in summaries():
        out = io.StringIO()
        console = Console(file=out, highlight=False, soft_wrap=True, width=200)
        screen.show(summary, console, verbose=True)
        seen += out.getvalue()
        for line in out.getvalue().split("\n"):
            assert not any(map(is_acting, line)), line
    assert "[bold red]" in seen  # as it was said, and not obeyed


def test_pages_and_documents_hold_it_as_text() -> None:
    for summary in summaries():
        document = page.page(summary)
        assert "<script>" not in document
        for one in document:
            assert one == "\n" or not is_acting(one)
        ElementTree.fromstring(junit.encode(summary))
        verdict, _ = stored.decode(stored.encode(summary))
        assert [one.id for one in verdict.findings] == [f.id for f in summary.verdict.findings]


@pytest.mark.parametrize("attempt", [*ATTEMPTS, "plain", "", "-rf"])
def test_a_word_is_one_word_of_the_shell(attempt: str) -> None:
    text = attempt.replace("\x00", "")
    argv = ["bash", "-c", f"printf %s {word(text)}"]
    said = subprocess.run(argv, capture_output=True, check=True, timeout=10).stdout.decode()
    assert said == text
    assert MARK not in active(command("ssh", text))


def test_a_remedy_is_one_line_and_no_word_is_lost() -> None:
    fix = Fix(command=f"echo a\n{MARK}\x1b[2J\u202e")
    assert fix.command == f"echo a {MARK} [2J "
    long = f"cat {'x' * 30_000}"
    assert Fix(command=long).command == long


def test_a_healthy_report_is_taken_as_it_is() -> None:
    report = healthy("node1")
    taken = Intake(3).take(report)
    assert taken == report
    assert Intake(3).take(taken) == taken


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (NodeReport(node="a; b"), "no name of a node"),
        (NodeReport(node=""), "no name of a node"),
        (NodeReport(node="-oProxyCommand=x"), "no name of a node"),
        (NodeReport(node="a", extra={"x": "y" * (4 << 20)}), "bytes, at most"),
        (NodeReport(node="a", edges={f"n{i}": EdgeFacts() for i in range(999)}), "names 999"),
        (NodeReport(node="a", listening=Listening(mesh=70_000)), "port"),
        (NodeReport(node="a", listening=Listening(ephemeral=(-1,))), "port"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(report: NodeReport, why: str) -> None:
    with pytest.raises(RefusedReportError, match=why):
        Intake(3).take(report)
    told: list[str] = []
    exchange = Exchange(NodeReport(node="me"), 3, told.append)
    assert not exchange.add(report)
    assert not exchange.add(report)
    assert len(told) == 1
    assert why.split()[-1] in told[0]
    assert set(exchange.reports) == {"me"}


def test_more_nodes_than_there_can_be_are_not_taken() -> None:
    told: list[str] = []
    exchange = Exchange(NodeReport(node="me"), 3, told.append)
    for number in range(500):
        exchange.add(NodeReport(node=f"n{number}"))
    assert len(exchange.reports) == 2 * 3 + 64
    assert 0 < len(told) <= 16


def test_what_a_node_says_of_itself_is_the_same_for_it_and_for_the_others() -> None:
    mine = Exchange(NodeReport(node="a"), 2)
    mine.publish(
        extra={"x": f"{ATTEMPTS[9]}{'y' * (MOST_TEXT + 9)}"}, addresses=("10.0.0.1", "$(x)")
    )
    other = Exchange(NodeReport(node="b"), 2)
    other.add(msgspec.json.decode(msgspec.json.encode(mine.mine), type=NodeReport))
    assert other.reports["a"] == mine.mine
    assert mine.mine.addresses == ("10.0.0.1",)
    assert "\x1b" not in mine.mine.extra["x"]
    assert mine.mine.extra["x"].endswith("y...")
