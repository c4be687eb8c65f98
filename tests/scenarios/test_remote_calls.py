"""Programs that know each other by torch.distributed.rpc alone are runs with ranks and an end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ports import free_port
from tests.scenarios import rpc_program
from tests.scenarios.conftest import Watched
from tests.scenarios.launched import PYTHON, cells, launch
from tests.server.conftest import ServerProcess

pytestmark = pytest.mark.multiproc
SCRIPT = str(Path(rpc_program.__file__))
TORCHRUN = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")


@pytest.fixture(scope="module")
def server(shared_server: ServerProcess) -> ServerProcess:
    return shared_server


def port() -> dict[str, str]:
    return {"FREE_PORT": str(free_port())}


def is_whole(run: Watched) -> None:
    rows = run.ranks()
    assert [(row["rank"], row["exit_text"]) for row in rows] == [
        (rank, "ended cleanly") for rank in range(rpc_program.RANKS)
    ]
    assert run.get()["run"]["world_size"] == rpc_program.RANKS
    for rank in range(1, rpc_program.RANKS):
        steps = cells(run, rank)
        assert len(steps) == rpc_program.STEPS
        for step in steps:  # what the server takes, the worker waits
            assert step["blocked_ms"] > 0.9e3 * rpc_program.SERVER_S, step


@pytest.mark.parametrize("how", ["spawn", "late"])
def test_ranks_that_only_init_rpc_knows(tmp_path: Path, server: ServerProcess, how: str) -> None:
    is_whole(launch(server, tmp_path, PYTHON, SCRIPT, how, **port()))


def test_ranks_under_torchrun(tmp_path: Path, server: ServerProcess) -> None:
    is_whole(launch(server, tmp_path, *TORCHRUN, SCRIPT))


def test_a_worker_that_dies_ends_the_run_and_is_named(
    tmp_path: Path, server: ServerProcess
) -> None:
    run = launch(server, tmp_path, PYTHON, SCRIPT, "raises", code=1, **port())
    verdict = run.until(lambda: run.get().get("verdict"))
    assert (verdict["kind"], verdict["ranks"]) == ("crash", [2])
