"""`--json` means one JSON object on stdout and nothing else, in each command, errors included."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rankscope import cli

AWAY = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("report", "r", "--server", AWAY, "--json"), 2, "does not answer"),
        (("report", "r", "--json", "--bogus"), 64, "unrecognized arguments: --bogus"),
        (("report", "r", "--json", "--serv", AWAY), 64, "unrecognized arguments: --serv"),
        (("explain", "--json", "/no/such"), 2, "no such file"),
        (("import", "/no/such", "--json", "--server", AWAY), 1, "No such file"),
        (("ask", "stacks", "r", "--json", "--server", AWAY), 2, "does not answer"),
        (("ask", "sing", "r", "--json"), 64, "invalid choice: 'sing'"),
        (("run", "--json", "--"), 64, "no command given"),
        (("demo", "--json", "--ranks", "99"), 64, "say a number of ranks"),
        (("preflight", "--json", "--nodes", "a,b", "--node", "c"), 64, "not among the nodes"),
        (("doctor", "--json", "--bogus"), 64, "unrecognized arguments"),
    ],
)
def test_an_error_is_the_object(
    words: tuple[str, ...], code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        found = cli.main(words)
    except SystemExit as left:
        found = left.code if isinstance(left.code, int) else -1
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert found == code == answer["exit_code"]
    assert told in answer["error"]
    assert "Try: " not in answer["error"]
    assert told in captured.err  # people read it as before


def test_without_the_flag_or_behind_the_command_nothing_is_added(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["explain", "/no/such"]) == 2
    (tmp_path / "a.log").write_text("step 1 loss 2.3\n")
    assert cli.main(["explain", "--json", str(tmp_path / "a.log")]) == 0
    with pytest.raises(SystemExit):  # here --json has the name of a file
        cli.main(["preflight", "merge", "--json", str(tmp_path / "one"), "/no/such"])
    out = capsys.readouterr().out
    assert "exit_code" not in out
    assert json.loads(out)["root"] is None


def test_the_flag_of_a_program_that_is_run_is_its_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    leaves = [sys.executable, "-c", "import sys; sys.exit(3)", "--json", "x"]
    assert cli.main(["run", "--dir", str(tmp_path), *leaves]) == 3
    assert capsys.readouterr().out == ""


def test_the_list_of_checks_is_an_object_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["preflight", "--list", "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert {"id": "node.secret", "family": "launch"}.items() <= checks[0].items()
