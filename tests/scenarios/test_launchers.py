"""`rankscope run` in front of every kind of launcher: the same two ranks, known by their number."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests import fork_server
from tests.ports import free_port
from tests.scenarios import slurm, starts
from tests.scenarios.conftest import Watched
from tests.scenarios.launched import PYTHON, RUN, TORCHRUN, cells, environment, launch, operations
from tests.server.conftest import ServerProcess

pytestmark = pytest.mark.multiproc
SCRIPT, ROOT = str(Path(starts.__file__)), Path(__file__).parents[2]
MPI_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.fixture(scope="module")
def server(shared_server: ServerProcess) -> ServerProcess:
    return shared_server


def is_whole(run: Watched) -> None:
    """Both ranks are there, did all their steps and ended, and nobody else was taken for one."""
    ranks = run.ranks()
    assert [(row["rank"], row["local_rank"]) for row in ranks] == [(0, 0), (1, 1)]
    assert {row["exit_text"] for row in ranks} == {"ended cleanly"}
    assert run.get()["run"]["world_size"] == 2
    for rank in (0, 1):
        assert len(cells(run, rank)) == starts.STEPS
        assert operations(run, rank)["all_reduce"] == starts.STEPS


def port() -> dict[str, str]:
    return {"FREE_PORT": str(free_port())}


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_multiprocessing(tmp_path: Path, server: ServerProcess, method: str) -> None:
    run = launch(server, tmp_path, PYTHON, SCRIPT, method, **port())
    is_whole(run)
    assert run.get()["run"]["launcher"] == "python"


def test_wrappers(tmp_path: Path, server: ServerProcess) -> None:
    """A shell script calls env and torchrun, which starts a script per rank, which starts Python.

    Before the training each rank runs a Python program that is none.
    """
    inner, outer = tmp_path / "rank.sh", tmp_path / "job.sh"
    python, script = shlex.quote(PYTHON), shlex.quote(SCRIPT)
    torchrun = shlex.join([*TORCHRUN, "--no-python", str(inner)])
    inner.write_text(f"#!/bin/sh\n{python} -c 'import logging'\nexec {python} {script} again\n")
    outer.write_text(f"{python} -c 'print(1)'\nenv A=1 {torchrun}\n")
    inner.chmod(0o700)
    run = launch(server, tmp_path, "sh", str(outer))
    is_whole(run)
    assert run.get()["run"]["name"] == "job.sh"


@pytest.mark.core
def test_two_nodes_on_one_machine(tmp_path: Path, server: ServerProcess) -> None:
    """Each node has its own launcher; both name the run, and here they share a directory."""
    rendezvous = f"127.0.0.1:{free_port()}"
    nodes = [
        subprocess.Popen(
            [*RUN, PYTHON, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank",
             str(node), "--nproc-per-node", "1", "--rdzv-backend", "static", "--rdzv-endpoint",
             rendezvous, "--rdzv-id", "test", SCRIPT],
            env=environment(tmp_path, server, **fork_server.under_torchrun()),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node in (0, 1)
    ]  # fmt: skip
    outputs = [node.communicate(timeout=200)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    run = Watched(server, tmp_path, "test")
    run.log.write_text("".join(outputs))
    run.until(lambda: run.get()["run"]["status"] == "ended", 30)
    ranks = run.ranks()
    assert [(row["rank"], row["local_rank"], row["node_rank"]) for row in ranks] == [
        (0, 0, 0), (1, 0, 1),
    ]  # fmt: skip
    for rank in (0, 1):
        assert operations(run, rank)["all_reduce"] == starts.STEPS


def test_accelerate_launch(tmp_path: Path, server: ServerProcess) -> None:
    """Its launcher of several processes, which asks for no device."""
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("needs accelerate: pip install 'rankscope[dev]'")
    run = launch(
        server, tmp_path, PYTHON, "-m", "accelerate.commands.launch", "--multi_gpu",
        "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no",
        "--dynamo_backend", "no", "--main_process_port", str(free_port()), SCRIPT,
    )  # fmt: skip
    is_whole(run)
    assert run.get()["run"]["launcher"] == "accelerate"


@pytest.mark.needs("mpirun")
def test_mpirun(tmp_path: Path, server: ServerProcess) -> None:
    command = ("mpirun", "--oversubscribe", "-np", "2", *fork_server.python(), SCRIPT)
    run = launch(server, tmp_path, *command, **MPI_ROOT, **port())
    is_whole(run)
    assert run.get()["run"]["launcher"] == "mpirun"


@pytest.mark.needs("mpich")
def test_mpich(tmp_path: Path, server: ServerProcess) -> None:
    command = ("mpiexec.hydra", "-n", "2", *fork_server.python(), SCRIPT)
    run = launch(server, tmp_path, *command, **port())
    is_whole(run)
    assert run.get()["run"]["launcher"] == "mpirun"


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("mpirun", marks=pytest.mark.needs("mpirun")),
        pytest.param("mpiexec.hydra", marks=pytest.mark.needs("mpich")),
    ],
)
def test_variables_that_mpi_passes_on(tmp_path: Path, server: ServerProcess, launcher: str) -> None:
    """The lines of docs/attach.md, on one host: nothing is in front of the command."""
    text = (ROOT / "docs" / "attach.md").read_text()
    (line,) = re.findall(rf"^{re.escape(launcher)} -n.*$", text, re.MULTILINE)
    parts = {
        "16": "2", "node0:8,node1:8": "localhost:2", "node0,node1": "localhost", "-ppn 8": "-ppn 2",
        "=node0": "=127.0.0.1", "http://head:8787": server.url, "llama-7": tmp_path.name,
        "29500": str(free_port()), "python train.py": shlex.join([PYTHON, SCRIPT]),
    }  # fmt: skip
    for theirs, ours in parts.items():
        line = line.replace(theirs, ours)
    run = launch(server, tmp_path, *shlex.split(line), attach=(),
                 **MPI_ROOT, **port())  # fmt: skip
    is_whole(run)


@pytest.mark.needs("root", "slurm")
def test_srun(tmp_path: Path, server: ServerProcess) -> None:
    """One `rankscope run` before srun, and one in each of its tasks."""
    with slurm.cluster(tmp_path / "slurm") as variables:
        before = launch(
            server, tmp_path, "srun", "-n", "2", *fork_server.python(), SCRIPT,
            RANKSCOPE_RUN_ID="before", **variables, **port(),
        )  # fmt: skip
        inside = launch(
            server, tmp_path, *RUN, PYTHON, SCRIPT, attach=("srun", "-n", "2"),
            RANKSCOPE_RUN_ID="inside", **variables, **port(),
        )  # fmt: skip
    is_whole(before)
    is_whole(inside)
    assert before.get()["run"]["launcher"] == "srun"
    lines = inside.get("/logs?limit=500")["lines"]
    said = {line["message"]: line["rank"] for line in lines if "trained" in line["message"]}
    # each task's own launcher knows whose output it passes on
    assert said == {"trained as 0": 0, "trained as 1": 1}


@pytest.mark.needs("root", "slurm")
@pytest.mark.parametrize("tasks", [1, 2], ids=["torchrun", "srun"])
def test_sbatch(tmp_path: Path, server: ServerProcess, tasks: int) -> None:
    """The scripts of docs/attach.md, in a batch job of one node."""
    script = tmp_path / "job.sh"
    script.write_text(_recipe(f"#SBATCH --nodes=2 --ntasks-per-node={tasks}", server.url))
    with slurm.cluster(tmp_path / "slurm") as variables:
        environ = environment(tmp_path, server, **variables)
        del environ["RANKSCOPE_RUN_ID"]  # the job names it
        done = subprocess.run(
            ["sbatch", "--wait", "--parsable", "--output=job.out", str(script)], cwd=tmp_path,
            env=environ, capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
    said = (tmp_path / "job.out").read_text()
    assert done.returncode == 0, done.stderr + said
    run = Watched(server, tmp_path, f"slurm-{done.stdout.strip()}")
    run.log.write_text(said)
    run.until(lambda: run.get().get("run", {}).get("status") == "ended", 30)
    is_whole(run)


def _recipe(first: str, url: str) -> str:
    """Return the script of the documents that begins so, with what this machine has."""
    text = (ROOT / "docs" / "attach.md").read_text()
    (found,) = re.findall(rf"```sh\n(#!/bin/sh\n{re.escape(first)}\n.*?)```", text, re.DOTALL)
    torchrun, run = shlex.join(TORCHRUN[:3]), shlex.join(RUN[:-1])
    parts = {
        "--nodes=2": "--nodes=1", "http://head:8787": url, "rankscope run": run,
        "torchrun": torchrun, "python train.py": f"{PYTHON} {SCRIPT}", "train.py": SCRIPT,
        "29500": str(free_port()),
    }  # fmt: skip
    for theirs, ours in parts.items():
        found = found.replace(theirs, ours)
    return found.replace("export MASTER_ADDR", f"export FREE_PORT={free_port()} MASTER_ADDR")


@pytest.mark.needs("root", "slurm")
def test_a_rank_of_srun_that_dies_before_its_group(tmp_path: Path, server: ServerProcess) -> None:
    with slurm.cluster(tmp_path / "slurm") as variables:
        run = launch(server, tmp_path, "srun", "-n", "2", PYTHON, SCRIPT, "dies", code=1,
                     **variables)  # fmt: skip
    assert [row["rank"] for row in run.ranks()] == [0, 1]
    errors = run.get("/errors")
    assert "told to die before there is a group" in str(errors)


def test_a_pod_that_numbers_its_nodes(tmp_path: Path, server: ServerProcess) -> None:
    """RANK and WORLD_SIZE of a pod are its node's: neither torchrun nor a parent is rank 0."""
    pod = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": str(free_port())}
    torchrun = pod | {"RANKSCOPE_RUN_ID": "torchrun"} | fork_server.under_torchrun()
    run = launch(server, tmp_path, *TORCHRUN, SCRIPT, **torchrun)
    is_whole(run)
    run = launch(server, tmp_path, PYTHON, SCRIPT, "spawn", **(pod | {"RANKSCOPE_RUN_ID": "spawn"}))
    is_whole(run)


def test_by_environment_all_ranks_share_a_run(tmp_path: Path, server: ServerProcess) -> None:
    """Without a name and without `rankscope run`: the first process names the run."""
    variables = environment(tmp_path, server, RANKSCOPE="1", **port())
    variables.pop("RANKSCOPE_RUN_ID")
    done = subprocess.run([PYTHON, SCRIPT, "spawn"], env=variables, check=False, timeout=200)
    assert done.returncode == 0
    (name,) = [entry for entry in os.listdir(tmp_path) if (tmp_path / entry / "node").exists()]
    run = Watched(server, tmp_path, name)
    run.log.write_text(name)
    run.until(lambda: run.get().get("run", {}).get("status") == "ended", 60)
    is_whole(run)
