"""Ray Train on a real Ray of this machine: its workers are ranks, however their training ends."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.others import PYTHON
from tests.scenarios.conftest import Watched
from tests.scenarios.launched import RUN, cells, environment, operations
from tests.server.conftest import ServerProcess

pytestmark = [pytest.mark.multiproc, pytest.mark.needs("others")]
SCRIPT = str(Path(__file__).with_name("ray_program.py"))
STEPS = 24  # of each of its runs


def train(
    server: ServerProcess, folder: Path, *ways: str, attach: tuple[str, ...] = (), **variables: str
) -> str:
    """Train once in each of the ways, on one Ray; return what was printed."""
    with tempfile.TemporaryDirectory(prefix="ray.") as short:  # it holds sockets
        environ = environment(
            folder, server, RAY_FOLDER=short, RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0",
            **variables,
        )  # fmt: skip
        if "RANKSCOPE_RUN_ID" not in variables:
            del environ["RANKSCOPE_RUN_ID"]
        done = subprocess.run(
            [*attach, PYTHON, SCRIPT, str(folder), *ways], env=environ, cwd=folder, timeout=400,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def by_environment(
    shared_server: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Watched]:
    """Runs without `rankscope run`: variables that Ray passes on, and a name for each run."""
    folder = tmp_path_factory.mktemp("ray")
    said = train(shared_server, folder, "ends", "raises", "killed", "restarts", RANKSCOPE="1")
    runs = {}
    for way, status in (
        ("ends", "ended"), ("raises", "failed"), ("killed", "failed"), ("restarts", "ended"),
    ):  # fmt: skip
        run = runs[way] = Watched(shared_server, folder, f"ray-{way}")
        run.log.write_text(said)
        run.until(functools.partial(is_now, run, status), 30)
    return runs


def is_now(run: Watched, status: str) -> bool:
    return bool(run.get()["run"]["status"] == status)


def failure(run: Watched) -> dict[str, Any]:
    """Return the finding that explains how a run failed."""
    found: dict[str, Any] = run.until(lambda: run.get()["verdict"])
    return found


def test_a_run_that_ends_is_no_failure(by_environment: dict[str, Watched]) -> None:
    """Ray ends each worker with exit code 1, also after its training function has returned."""
    run = by_environment["ends"]
    known, ranks = run.get()["run"], run.ranks()
    assert (known["launcher"], known["world_size"], known["step"]) == ("ray", 2, STEPS)
    assert known["name"].startswith("ray_train_run-")
    assert [(row["rank"], row["local_rank"], row["exit_text"]) for row in ranks] == [
        (0, 0, "ended cleanly"), (1, 1, "ended cleanly"),
    ]  # fmt: skip
    for rank in (0, 1):
        steps = cells(run, rank)
        assert len(steps) == STEPS
        assert operations(run, rank)["all_reduce"] >= STEPS
        assert steps[-1]["phases"]["backward"] > 0
    assert run.get()["answer"]["state"] == "healthy"


def test_the_exception_that_ray_catches_is_named(by_environment: dict[str, Watched]) -> None:
    run = by_environment["raises"]
    what = failure(run)["what"]
    assert "Rank 1 on" in what
    assert "RuntimeError: the disk of this worker is gone in step 13" in what
    (error, *_) = [
        one for one in run.get("/errors")["groups"] if "disk of this worker" in one["message"]
    ]
    assert error["ranks"] == [1]
    assert "ray_program.py" in error["traceback"]


def test_a_worker_that_is_killed_is_named(by_environment: dict[str, Watched]) -> None:
    what = failure(by_environment["killed"])["what"]
    assert "Rank 1 on" in what
    assert "SIGKILL" in what


def test_what_ray_restarts_takes_the_place_of_what_was_there(
    by_environment: dict[str, Watched],
) -> None:
    """Ray does not number its attempts; what ended the first one is among the recovered."""
    run = by_environment["restarts"]
    assert {row["exit_text"] for row in run.ranks()} == {"ended cleanly"}
    assert run.get()["run"]["step"] == STEPS
    findings = run.get("/findings")
    assert not findings["open"]
    assert [one["kind"] for one in findings["recovered"] if one["onset_step"] == 13] == ["crash"]


def test_in_front_of_the_driver(tmp_path: Path, shared_server: ServerProcess) -> None:
    """`rankscope run` in front: the workers of a Ray that the driver starts are seen as well."""
    said = train(shared_server, tmp_path, "ends", attach=RUN, RANKSCOPE_RUN_ID=tmp_path.name)
    run = Watched(shared_server, tmp_path, tmp_path.name)
    run.log.write_text(said)
    run.until(lambda: run.get()["run"]["status"] == "ended", 30)
    assert run.get()["run"]["name"] == "ray_program.py"
    assert {row["exit_text"] for row in run.ranks()} == {"ended cleanly"}
    assert [len(cells(run, rank)) for rank in (0, 1)] == [STEPS] * 2
