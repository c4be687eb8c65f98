"""The screens, as they stand in golden/; see cases.py for how to write them anew."""

from __future__ import annotations

import io
import os
import re
import unicodedata

import pytest
from rich.console import Console

from rankscope.preflight.checks.base import Run
from rankscope.preflight.model import CheckFinding, Fix, LaunchVerdict
from rankscope.preflight.report import screen, stored
from rankscope.preflight.report.summary import Summary, summarise
from tests.preflight.report import cases

WIDTHS = (80, 100, 120)
REWRITES = os.environ.get("RANKSCOPE_GOLDEN") == "write"


class Terminal(io.StringIO):
    """A stream that says of itself what a real one says."""

    encoding = "utf-8"


def shown(summary: Summary, width: int = 80, verbose: bool = False, **options: object) -> str:
    stream = Terminal()
    console = Console(file=stream, width=width, highlight=False, **options)  # type: ignore[arg-type]
    screen.show(summary, console, verbose)
    return stream.getvalue()


def case_of(name: str) -> tuple[LaunchVerdict, Run]:
    return stored.decode((cases.GOLDEN / f"{name}.json").read_bytes())


@pytest.mark.parametrize("name", cases.STORED)
def test_the_stored_answer_is_that_of_the_case(name: str) -> None:
    data = stored.encode(summarise(*cases.STORED[name]()))
    assert (cases.GOLDEN / f"{name}.json").read_bytes() == data


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", cases.STORED)
def test_the_screen_is_the_golden_one(name: str, width: int) -> None:
    summary = summarise(*case_of(name))
    text = shown(summary, width) + "\n== -v ==\n" + shown(summary, width, verbose=True)
    path = cases.GOLDEN / f"{name}.{width}.txt"
    if REWRITES:
        path.write_text(text)
    assert path.read_text() == text


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", cases.STORED)
def test_only_commands_are_wider_than_the_terminal(name: str, width: int) -> None:
    verdict, run = case_of(name)
    commands = {fix.command for finding in verdict.findings for fix in finding.fix}
    for line in shown(summarise(verdict, run), width, verbose=True).splitlines():
        is_command = any(line.strip() and line.strip() in command for command in commands)
        assert len(line) <= width or is_command, line


def test_green_is_quiet() -> None:
    lines = shown(summarise(*cases.green()), 120).splitlines()
    assert len(lines) == 3
    assert lines[2].endswith("exit 0")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("nodes", "bad"), [(1000, 300), (1000, 1), (33, 33), (32, 20), (2, 2)])
def test_any_answer_fits_one_screen(nodes: int, bad: int, width: int) -> None:
    text = shown(summarise(*cases.many(nodes, bad)), width)
    rows = sum(max(1, -(-len(line) // width)) for line in text.splitlines())
    assert rows <= screen.MOST_LINES
    assert "FAIL 1" in text  # the worst one is never cut away
    assert "fix (" in text


def test_findings_of_one_check_are_told_together_where_they_do_not_fit() -> None:
    text = shown(summarise(*cases.many()), 100)
    assert text.count("more like it on gpu") == 3
    assert "200 failures, 100 warnings, exit 2" in text
    everything = shown(summarise(*cases.many()), 100, verbose=True)
    assert all(f"{'WARN' if n % 3 == 1 else 'FAIL'}" in everything for n in range(3))
    assert everything.count("[proven]") == 300


def test_the_worst_comes_first_and_numbers_are_those_of_the_lines() -> None:
    text = shown(summarise(*cases.red()))
    marks = re.findall(r"^(FAIL|WARN) (\d+)", text, re.M)
    assert marks == [("FAIL", "1"), ("FAIL", "2"), ("WARN", "3")]


def test_no_colour_without_a_terminal_and_words_say_the_same() -> None:
    plain = shown(summarise(*cases.red()))
    coloured = shown(summarise(*cases.red()), force_terminal=True, color_system="standard")
    assert "\x1b" not in plain
    assert "\x1b[1;31mFAIL 1" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain


def test_no_color_takes_the_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = shown(summarise(*cases.red()), force_terminal=True, color_system="standard")
    assert not re.search(r"\x1b\[[\d;]*3\d[;m]", text)


def test_ascii_terminals_get_words() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    screen.show(summarise(*cases.red()), Console(file=stream, width=100, highlight=False))
    stream.flush()
    text = stream.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert "names ok" in text
    assert "ports FAIL" in text


@pytest.mark.parametrize("verbose", [False, True])
def test_nothing_from_other_machines_moves_the_cursor(verbose: bool) -> None:
    text = shown(summarise(*cases.hostile()), verbose=verbose)
    odd = {one for one in text if unicodedata.category(one)[0] == "C"} - {"\n"}
    assert not odd
    assert "[red]node[/red]" in text
    assert not re.search(r"^FAIL 9", text, re.M)  # a forged line stays inside of its own


def test_a_command_is_never_cut_or_broken() -> None:
    command = "sudo nft add rule inet filter input " + "x" * 300
    found = CheckFinding(id="a.b", status="fail", title="t", fix=(Fix(node="n", command=command),))
    run = Run("1", ("n",), cases.reports(("n",)))
    for width in (40, 80):
        assert command in shown(summarise(cases.verdict(run, (found,)), run), width)


def test_what_is_unknown_is_shown_and_never_counted_as_passed() -> None:
    run = Run("1", cases.THREE, cases.reports(cases.THREE))
    text = shown(summarise(cases.verdict(run, (cases.HANG,)), run))
    assert "fs.hang" in text
    assert "1 unknown" in text
    assert "25 checks passed" in text


def test_an_interrupted_preflight_is_no_pass() -> None:
    verdict, run = cases.green()
    summary = summarise(verdict, run, is_interrupted=True)
    assert summary.exit_code == 3
    assert "interrupted" in shown(summary)
    assert "not everything was evaluated, exit 3" in shown(summary)
    assert "passed, exit" not in shown(summary)
    assert summarise(*cases.red(), is_interrupted=True).exit_code == 2
