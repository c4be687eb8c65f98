"""The ways to attach record the same; a full disk costs the record and not the run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.agent import recorded
from tests.scenarios.conftest import Watched
from tests.server.conftest import ServerProcess

SCRIPT = """
import sys, torch
{setup}
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(10):
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def server(shared_server: ServerProcess) -> ServerProcess:
    return shared_server


def variables(directory: Path, server: ServerProcess, **more: str) -> dict[str, str]:
    environment = recorded.environment(directory, RANKSCOPE_SERVER=server.url, **more)
    for name in ("RANKSCOPE", "RANKSCOPE_COLLECTOR", "PYTHONPATH"):
        environment.pop(name)
    return environment


def torchrun(script: Path) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(script),
    ]  # fmt: skip


@pytest.mark.multiproc
@pytest.mark.parametrize("way", ["run", "environment", "init"])
def test_all_ways_record_the_same(tmp_path: Path, server: ServerProcess, way: str) -> None:
    script = tmp_path / "train.py"
    setup = "import rankscope; rankscope.init()" if way == "init" else ""
    script.write_text(SCRIPT.format(setup=setup))
    environment = variables(tmp_path, server, RANKSCOPE_RUN_ID=way)
    command = torchrun(script)
    if way == "run":
        command = [sys.executable, "-m", "rankscope", "run", "--", *command]
    if way == "environment":
        environment["RANKSCOPE"] = "1"
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    run = Watched(server, tmp_path, way)
    run.until(lambda: run.get().get("run", {}).get("status") == "ended", 30)
    for rank in (0, 1):
        rows = run.get(f"/collectives/records?rank={rank}&limit=500")["rows"]
        assert sum(row["operation"] == "all_reduce" for row in rows) == 10
        assert {row["state"] for row in rows} == {"ended"}
        assert run.get(f"/cell?rank={rank}&step=10")["step_ms"] > 0
    assert run.get("/environment")["ranks"] == [0, 1]
    assert [rank["exit_text"] for rank in run.ranks()] == [run.ranks()[0]["exit_text"]] * 2


@pytest.mark.multiproc
def test_a_script_without_torch_distributed_alone(tmp_path: Path, server: ServerProcess) -> None:
    script = tmp_path / "train.py"
    script.write_text("import logging; logging.warning('only this'); print('hello')\n")
    done = subprocess.run(
        [sys.executable, "-m", "rankscope", "run", "--", sys.executable, str(script)],
        env=variables(tmp_path, server), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("hello\n")


@pytest.mark.core
@pytest.mark.multiproc
@pytest.mark.needs("mount")
def test_a_full_disk_stops_the_record_not_the_run(tmp_path: Path, server: ServerProcess) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)], check=True
    )  # fmt: skip
    try:
        script = tmp_path / "train.py"
        script.write_text(SCRIPT.format(setup=""))
        environment = variables(disk, server, RANKSCOPE="1", RANKSCOPE_DIR=str(disk))
        environment["RANKSCOPE"] = "1"
        done = subprocess.run(
            torchrun(script), env=environment, capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said = [line for line in done.stderr.splitlines() if line.startswith("rankscope:")]
        assert 1 <= len(said) <= 2  # at most one line a rank, and at least one has no room
        assert all("training continues" in line for line in said)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)
