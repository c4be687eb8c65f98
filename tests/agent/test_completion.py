"""Completion, asked for in a real bash that has read the script; the manual page, read by man."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope import cli
from rankscope.cli import completion
from rankscope_server.settings import SETTINGS

COMMANDS = {command.name for command in (cli._load(*row) for row in cli._MODULES)}
# what bash does at a tab: it calls the function that `complete` has for the word, then reads back
ASK = """
set -u
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*" COMP_POINT=$((${#COMP_LINE} + 1))
function=$(complete -p rankscope | sed -E 's/.* -F ([^ ]+) .*/\\1/')
$function rankscope "${@: -1}" "${@: -2:1}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "rankscope.bash"
    done = subprocess.run(
        [sys.executable, "-m", "rankscope", "completion", "bash"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    path.write_text(done.stdout)
    return path


def completed(script: Path, *words: str, cwd: Path | None = None) -> set[str]:
    """Return what bash offers for the last of the words."""
    done = subprocess.run(
        ["bash", "--norc", "-c", ASK, "bash", str(script), "rankscope", *words],
        capture_output=True, text=True, check=True, cwd=cwd,
    )  # fmt: skip
    assert not done.stderr
    return set(done.stdout.split())


def test_commands_and_their_options(script: Path) -> None:
    assert completed(script, "") == COMMANDS
    assert completed(script, "pre") == {"preflight"}
    assert {"--server", "--run-id", "--preflight", "--json"} < completed(script, "run", "--")
    assert completed(script, "run", "--preflight", "") >= {"quick", "default", "deep"}
    assert completed(script, "ask", "pro") == {"profile"}
    assert completed(script, "completion", "") == set(completion._SHELLS)


def test_flags_of_the_server_are_those_of_its_settings(script: Path) -> None:
    flags = {setting.flag for setting in SETTINGS if not setting.is_secret}
    assert completed(script, "serve", "--") == flags | {"--config", "--check"}


def test_files_and_folders(script: Path, tmp_path: Path) -> None:
    (tmp_path / "train.log").touch()
    (tmp_path / "runs").mkdir()
    assert completed(script, "explain", "", cwd=tmp_path) >= {"train.log", "runs"}
    assert completed(script, "report", "ru", "--html", "tr", cwd=tmp_path) == {"train.log"}
    assert completed(script, "run", "--dir", "", cwd=tmp_path) == {"runs"}


@pytest.mark.parametrize("shell", completion._SHELLS)
def test_each_shell_gets_a_script_of_all_commands(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in COMMANDS)
    assert "look-seconds" in printed


@pytest.mark.needs("man")
def test_man_reads_the_page_of_all_commands(tmp_path: Path) -> None:
    page = subprocess.run(
        [sys.executable, "-m", "rankscope", "man"], capture_output=True, text=True, check=True
    ).stdout
    path = tmp_path / "rankscope.1"
    path.write_text(page)
    read = subprocess.run(
        ["man", "--warnings", "-l", str(path)], capture_output=True, text=True, check=True,
        env=os.environ | {"MANWIDTH": "100", "LC_ALL": "C.UTF-8"},
    )  # fmt: skip
    assert read.stderr == ""
    assert "rankscope - Watch, explain and search" in read.stdout
    for command in COMMANDS:
        assert f"   rankscope {command}\n" in read.stdout
    example = "rankscope run --preflight -- torchrun --nnodes 2 --node-rank 0 ... train.py"
    assert f"         {example}\n" in read.stdout
    assert "--look-seconds" in read.stdout


def test_without_the_library_of_the_page_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["man"]) == 1
    assert "pip install 'rankscope[completion]'" in capsys.readouterr().err


@pytest.mark.parametrize("word", sorted(cli._USUAL_NAMES))
def test_names_of_other_tools_lead_to_ours(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert word not in COMMANDS
    with pytest.raises(SystemExit) as ended:
        cli.main([word, "x"])
    assert ended.value.code == cli.EXIT_USAGE
    (first, _) = capsys.readouterr().err.splitlines()
    for said in first.partition("rankscope ")[2].split(", or "):
        _, parsers = cli.all_commands()
        name, *words = said.split()
        parsers[name].parse_args(words)


def test_without_shtab_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["completion", "bash"]) == 1
    assert "pip install 'rankscope[completion]'" in capsys.readouterr().err
