"""`rankscope diff` says what the server answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from rankscope.cli.diff import Side, path_of, side_of
from tests.api import get
from tests.command_server import run
from tests.ports import free_port
from tests.server.conftest import ServerProcess
from tests.server.seed import seed_run


def diff(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {name: text for name, text in os.environ.items() if not name.startswith("RANKSCOPE")}
    return run([sys.executable, "-m", "rankscope", "diff", *arguments],
               env=environ | {"COLUMNS": "200"})  # fmt: skip


@pytest.mark.parametrize(
    ("text", "side"),
    [
        ("run", Side("run", None, None, None)),
        ("run@2", Side("run", 2, None, None)),
        ("run:1-20", Side("run", None, 1, 20)),
        ("team:run@0:1-20", Side("team:run", 0, 1, 20)),
        ("a@b", Side("a@b", None, None, None)),
        ("run:x-y", Side("run:x-y", None, None, None)),
    ],
)
def test_a_side_is_a_run_with_attempt_and_steps(text: str, side: Side) -> None:
    assert side_of(text) == side


def test_an_id_is_escaped_in_the_address() -> None:
    path = path_of(Side("a b", None, 1, 2), Side("x/y", 1, None, None))
    assert path == "/runs/x%2Fy/compare?attempt=1&before=a+b&before_from=1&before_to=2"


def test_two_runs_and_what_is_wrong(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server()
    seed_run(server.url, run_id="monday", ranks=2, steps=60, fault="none")
    seed_run(server.url, run_id="tuesday", ranks=2, steps=60, fault="slow_compute", slow_from=1)
    done = diff("monday:11-60", "tuesday:11-60", "--server", server.url)
    assert done.returncode == 0, done.stderr
    asked = "runs/tuesday/compare?before=monday&before_from=11&before_to=60&from=11&to=60"
    answer = get(f"{server.url}/api/v1/{asked}")
    assert done.stdout.splitlines()[0] == answer["text"]
    assert "slower than in monday" in answer["text"]
    backward = next(line for line in done.stdout.splitlines() if line.startswith("backward"))
    row = next(row for row in answer["parts"] if row["part"] == "backward")
    assert f"{row['after_median_ms']:.3g}" in backward
    assert "longer (+" in backward
    printed = diff("monday:11-60", "tuesday:11-60", "--server", server.url, "--json")
    assert json.loads(printed.stdout) == answer
    lost = diff("monday", "no-such", "--server", server.url)
    assert (lost.returncode, "no run 'no-such'" in lost.stderr) == (2, True)
    away = diff("monday", "tuesday", "--server", f"127.0.0.1:{free_port()}")
    assert (away.returncode, "does not answer" in away.stderr) == (2, True)
