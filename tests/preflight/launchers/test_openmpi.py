"""Preflight under a real mpirun: on one machine, and over ssh between nodes of the laboratory."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.preflight.launchers.cluster import JOB_LIMIT_S, ROOT, Cluster, launches
from tests.preflight.scene import base_environment

pytestmark = [
    pytest.mark.together("launchers of preflight"),
    pytest.mark.needs("mpirun"),
]
QUICK = "preflight --quick --only launch,names,ports"
ROOT_MAY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
NODES = ["node0", "node1", "node2"]
SECRET = "RANKSCOPE_PREFLIGHT_TOKEN"


def test_of_the_ranks_of_one_machine_the_first_does_it(tmp_path: Path) -> None:
    agent = [sys.executable, "-m", "rankscope", *QUICK.split(), "--master-port", "29577"]
    done = subprocess.run(
        ["mpirun", "--oversubscribe", "-np", "3", *agent, "--only", "env.complete"],
        env=base_environment() | ROOT_MAY | {"PYTHONPATH": str(ROOT / "agent")}, cwd=tmp_path,
        capture_output=True, text=True, timeout=JOB_LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    for rank in (1, 2):
        assert f"OMPI_COMM_WORLD_LOCAL_RANK={rank}: local rank 0 of this machine" in said
    assert said.count("exit 0") == 1


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as made:
        options = made.start_ssh()
        made.lab.env[made.head].update(
            ROOT_MAY, OMPI_MCA_plm_rsh_args=shlex.join(options), OMPI_MCA_plm_rsh_agent="ssh",
            OMPI_MCA_btl="self,tcp",
        )  # fmt: skip
        yield made


def mpirun(cluster: Cluster, words: str, options: str = "", **env: str) -> tuple[int, str]:
    """Run two ranks on each node; return the exit code and what was said."""
    hosts = ",".join(f"{node}:2" for node in NODES)
    line = f"mpirun --host {hosts} {words} {cluster.folder}/bin/rankscope {QUICK} {options}"
    done = cluster.run(line, env)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.needs("root", "namespaces", "sshd")
def test_over_ssh_the_nodes_meet_at_the_first(cluster: Cluster) -> None:
    (cluster.work / "answer").mkdir()
    words = f"-wdir {cluster.work} -x MASTER_ADDR=node0 -x {SECRET}"
    code, said = mpirun(cluster, words, "--json answer/all", **{SECRET: "of this test alone"})
    assert code == 0, said
    assert said.count("local rank 0 of this machine") == 3
    answer = json.loads((cluster.work / "answer" / "all").read_text())
    assert answer["verdict"]["expected"] == NODES
    said_of = launches(answer)
    assert [said_of[node]["rank"] for node in NODES] == [0, 2, 4]
    assert [said_of[node]["launcher"] for node in NODES] == ["mpi"] * 3


@pytest.mark.needs("root", "namespaces", "sshd")
def test_without_names_and_a_first_node_it_says_what_to_give(cluster: Cluster) -> None:
    code, said = mpirun(cluster, "")
    assert code == 64, said
    assert "give --nodes a,b,..." in said
    assert "MASTER_ADDR" in said


@pytest.mark.needs("root", "namespaces", "sshd")
def test_the_secret_is_passed_on_only_when_it_is_named(cluster: Cluster) -> None:
    """With names of the nodes, and the key in the home directory that they share."""
    code, said = mpirun(cluster, "", "--nodes node0,node1,node2", **{SECRET: "of this test alone"})
    assert code == 0, said
    assert (cluster.folder / "home" / ".config" / "rankscope" / "preflight.key").exists()
