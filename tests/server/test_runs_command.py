"""`rankscope runs` and `rankscope doctor --server` against a real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import doctor
from tests.command_server import run
from tests.ports import free_port
from tests.server.conftest import ServerProcess
from tests.server.seed import seed_run, wait_until_judged

Start = Callable[..., ServerProcess]


def rankscope(*arguments: str, says: str = "") -> subprocess.CompletedProcess[str]:
    environ = {name: text for name, text in os.environ.items() if not name.startswith("RANKSCOPE")}
    if arguments[0] == "doctor":
        return doctor.run(*arguments[1:], env=environ)
    return run([sys.executable, "-m", "rankscope", *arguments], input=says, env=environ)


@pytest.fixture
def server(start_server: Start) -> ServerProcess:
    server = start_server("--keep-runs-bytes", "1", "--retention-seconds", "3600")
    for number, name in enumerate(("first", "second")):
        seed_run(server.url, run_id=name, ranks=2, steps=30, fault="none", seed=number)
    seed_run(server.url, run_id="live", ranks=2, steps=30, fault="none", end=False)
    wait_until_judged(server.url)
    return server


def test_doctor_shows_sizes_and_what_would_go(server: ServerProcess) -> None:
    done = rankscope("doctor", "--server", server.url)
    assert done.returncode == 1, done.stderr  # the live run is larger than the limit
    assert "Every part of the server is ready." in done.stdout
    for text in ("single collectives", "first", "live", "would be removed now", "everything"):
        assert text in done.stdout, done.stdout
    assert "above --keep-runs-bytes stay" in done.stdout
    document = json.loads(rankscope("doctor", "--server", server.url, "--json").stdout)
    assert document["exit_code"] == 1
    assert {row["run_id"] for row in document["retention"]["planned"]} == {"first", "second"}
    assert document["storage"]["bytes"] > 0
    assert [run["run_id"] for run in document["storage"]["runs"]]


def test_doctor_without_a_server_says_so() -> None:
    done = rankscope("doctor", "--server", f"127.0.0.1:{free_port()}")
    assert done.returncode == 2
    assert "does not answer" in done.stderr


def test_runs_are_listed_pinned_deleted_and_released(server: ServerProcess) -> None:
    def runs(*arguments: str, says: str = "") -> subprocess.CompletedProcess[str]:
        return rankscope("runs", *arguments, "--server", server.url, says=says)

    listed = runs("list")
    assert listed.returncode == 0, listed.stderr
    assert "first" in listed.stdout
    assert runs("pin", "first").stdout == "first is pinned\n"
    refused = runs("delete", "first", "--yes", "first")
    assert (refused.returncode, "rankscope runs unpin first" in refused.stderr) == (1, True)
    assert runs("unpin", "first").returncode == 0
    assert runs("delete", "live", "--yes", "live").returncode == 1
    assert runs("delete", "nothing", "--yes", "nothing").returncode == 2
    assert runs("delete", "first", "--yes", "second").returncode == 64
    no = runs("delete", "first", says="second\n")
    assert (no.returncode, "nothing is deleted" in no.stderr) == (1, True)
    yes = runs("delete", "first", says="first\n")
    assert yes.returncode == 0, yes.stderr
    assert "first is deleted: " in yes.stdout
    assert runs("delete", "first", "--yes", "first").returncode == 1
    assert runs("release", "first").returncode == 0

    dry = runs("clean", "--dry-run", "--json")
    assert [row["run_id"] for row in json.loads(dry.stdout)["planned"]] == ["second"]
    assert "second" in runs("list").stdout
    cleaned = runs("clean")
    assert cleaned.returncode == 0, cleaned.stderr
    assert "done" in cleaned.stdout
    rows = json.loads(runs("list", "--json").stdout)["runs"]
    assert [row["run_id"] for row in rows] == ["live"]


def test_wrong_usage_is_told(tmp_path: Path) -> None:
    for arguments in (("delete",), ("list", "x"), ("pin",)):
        done = rankscope("runs", *arguments)
        assert done.returncode == 64
        assert done.stderr.startswith("rankscope runs: ")
