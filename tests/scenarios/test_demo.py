"""`rankscope demo` as a script uses it: one JSON object, the right culprit, nothing left."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest

from tests import fork_server
from tests.scenarios.conftest import processes_of

pytestmark = pytest.mark.multiproc
REAL, LIGHT = ("-m", "rankscope"), (str(Path(__file__).with_name("light_demo.py")),)


def start(
    tmp_path: Path, *arguments: str, environment: Mapping[str, str] = MappingProxyType({}),
    command: Sequence[str] = LIGHT,
) -> subprocess.Popen[str]:  # fmt: skip
    return subprocess.Popen(
        [sys.executable, *command, "demo", "--data-dir", str(tmp_path / "data"), *arguments],
        env=os.environ | environment | {"HOME": str(tmp_path), "DEMO_OF": str(tmp_path)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def run_once(
    tmp_path: Path, *arguments: str, environment: Mapping[str, str] = MappingProxyType({}),
    command: Sequence[str] = LIGHT,
) -> dict[str, Any]:  # fmt: skip
    words = ("--once", "--json", *arguments)
    if command is LIGHT:  # what ends early, and who launched it, are about torchrun
        environment = {"FORKED": json.dumps(fork_server.any_launcher()), **environment}
    process = start(tmp_path, *words, environment=environment, command=command)
    out, err = process.communicate(timeout=280)
    assert process.returncode in (0, 1), err
    answer: dict[str, Any] = json.loads(out)  # the only thing on standard output
    assert process.returncode == (0 if answer["match"] else 1)
    assert set(answer) >= {"truth", "verdict", "match", "url", "not_judged", "collectives"}
    assert answer["not_judged"] == ""
    assert answer["collectives"]
    assert not _left(tmp_path)
    return answer


def _left(tmp_path: Path) -> list[str]:
    deadline = time.monotonic() + 10
    while processes_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    return list(processes_of(tmp_path).values())


@pytest.mark.parametrize(
    ("fault", "strategy", "command"),
    [
        pytest.param("slow_compute", "ddp", REAL, marks=[pytest.mark.alone, pytest.mark.core]),
        pytest.param("slow_data", "pipeline", LIGHT, marks=pytest.mark.quiet),
        pytest.param("hang", "pipeline", LIGHT, marks=pytest.mark.quiet),
        pytest.param("crash", "ddp", LIGHT, marks=pytest.mark.quiet),
    ],
    ids=lambda value: value if isinstance(value, str) else "light" if value is LIGHT else "real",
)
def test_names_the_culprit(
    tmp_path: Path, fault: str, strategy: str, command: Sequence[str]
) -> None:
    answer = run_once(tmp_path, "--fault", fault, "--strategy", strategy, command=command)
    truth, verdict = answer["truth"], answer["verdict"]
    assert truth["fault"] == fault
    assert answer["match"], json.dumps(answer, indent=1)
    assert (verdict["kind"], verdict["ranks"]) == (fault, [truth["rank"]])
    assert abs(verdict["onset_step"] - truth["start_step"]) <= 3
    assert 0 < verdict["cost_throughput_ratio"] <= 1
    assert verdict["what"]
    assert verdict["why"]
    assert verdict["next"]
    accused = {rank for finding in answer["findings"] for rank in finding["ranks"]
               if finding["severity"] != "info"}  # fmt: skip
    assert accused == {truth["rank"]}
    if fault == "hang":
        assert answer["named_after_seconds"] < 10


@pytest.mark.quiet
def test_a_source_that_is_not_the_best_is_named_with_its_remedy(tmp_path: Path) -> None:
    """The caller's choice of a source and of a budget reaches the ranks.

    The first decision of a budget takes 8 s of training, its agreement 2 to 4 more.
    """
    choice = {"RANKSCOPE_COLLECTIVES": "kernels", "RANKSCOPE_OVERHEAD_PERCENT": "0.05",
              "RANKSCOPE_RUN_ID": "another", "RANKSCOPE": "0", "LEAST_SECONDS": "25"}  # fmt: skip
    answer = run_once(tmp_path, "--fault", "none", "--ranks", "2", environment=choice)
    assert answer["match"], json.dumps(answer, indent=1)
    assert answer["collectives"] == "kernels"
    assert answer["better_source"].startswith("probe ")
    assert "RANKSCOPE_OVERHEAD_PERCENT" in answer["thinned"]


@pytest.mark.quiet
def test_a_clean_run_has_no_finding(tmp_path: Path) -> None:
    answer = run_once(tmp_path, "--fault", "none", "--ranks", "2")
    assert answer["truth"] is None
    assert answer["verdict"] is None
    assert answer["match"]
    assert [f for f in answer["findings"] if f["severity"] != "info"] == []


@pytest.mark.core
def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    process = start(tmp_path, "--fault", "none")
    assert process.stdout is not None
    first = process.stdout.readline()
    assert "Rankscope watches 4 ranks" in first
    deadline = time.monotonic() + 60
    while len(processes_of(tmp_path)) < 7 and time.monotonic() < deadline:
        time.sleep(0.2)  # demo, server, launcher, torchrun and ranks
    os.killpg(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGTERM)  # as make passes it on
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "have ended" in out
    assert not _left(tmp_path)


def test_ctrl_c_after_a_right_verdict_is_a_success_for_make_too(tmp_path: Path) -> None:
    """On a terminal, where all of make's group gets the signal; one that knows only ASCII."""
    makefile = tmp_path / "Makefile"
    makefile.write_text(
        f"demo:\n\t@'{sys.executable}' '{LIGHT[0]}' demo --fault crash --seed 1 "
        f"--data-dir '{tmp_path / 'with blanks'}'\n"
    )
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "TERM": "dumb",
             "HOME": "", "DEMO_OF": str(tmp_path)}  # fmt: skip
    output = _on_a_terminal(["make", "-f", str(makefile)], plain, "Ctrl-C ends")
    assert "The verdict is right." in output
    assert output.rstrip().endswith("have ended."), output  # make has nothing to add
    assert output.isascii()
    assert not _left(tmp_path)


def _on_a_terminal(command: list[str], environment: dict[str, str], until: str) -> str:
    """Run a command on a terminal of its own, press Ctrl-C at some words; return all it wrote."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(command[0], command, os.environ | environment)
    output, is_pressed = b"", False
    with contextlib.suppress(OSError):  # what a terminal without a program answers
        while part := os.read(terminal, 65536):
            output += part
            if until.encode() in output and not is_pressed:
                is_pressed = True
                os.write(terminal, b"\x03")
    os.waitpid(pid, 0)
    os.close(terminal)
    return output.decode()


def test_ctrl_c_ends_a_rank_that_does_not_listen(tmp_path: Path) -> None:
    """torchrun waits for it for longer than a person does, and ranks have their own sessions."""
    process = start(tmp_path, "--fault", "none", "--ranks", "2")
    deadline = time.monotonic() + 60
    while not (stuck := _ranks(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert stuck, "no rank has started"
    os.kill(stuck[0], signal.SIGSTOP)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 130, err
    assert not _left(tmp_path)


def _ranks(tmp_path: Path) -> list[int]:
    return [
        process.pid
        for process in psutil.process_iter(["environ", "cmdline"])
        if (process.info["environ"] or {}).get("DEMO_OF") == str(tmp_path)
        and process.info["cmdline"][1:4] == ["-u", "-m", "rankscope_trainer"]
    ]


def test_bad_flags_say_what_is_possible(tmp_path: Path) -> None:
    process = start(tmp_path, "--fault", "slow")
    _, err = process.communicate(timeout=30)
    assert process.returncode == 64
    assert "slow_compute" in err
