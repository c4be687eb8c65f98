"""A TrainJob of Kubeflow Trainer: two pods that are processes here, with what it gives to them.

There is no cluster: each pod has its own host name, /etc/hosts and folder for files, and the
variables of `tests/platforms.py`, which says where they are from.
"""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest

from rankscope.cli.advice import Advising
from rankscope.http import Client
from tests.platforms import JOBSET_LABELS, TRAINJOB
from tests.ports import free_port
from tests.scenarios import kubernetes_job
from tests.scenarios.conftest import Watched
from tests.scenarios.launched import PYTHON, RUN, environment
from tests.server.conftest import ServerProcess

pytestmark = [pytest.mark.multiproc, pytest.mark.needs("root", "containers")]
SCRIPT = str(Path(kubernetes_job.__file__))
POD = (
    "unshare", "--mount", "--uts", "--propagation", "private", "sh", "-c",
    'mount --bind "$HOSTS" /etc/hosts && hostname "$HOSTNAME" && exec "$@"', "pod",
)  # fmt: skip
RUN_ID = "kubernetes-team-a-llama-8d3f5a0e"


@pytest.fixture(scope="module")
def server(shared_server: ServerProcess) -> ServerProcess:
    return shared_server


def start_pods(server: ServerProcess, folder: Path, attempt: int) -> list[tuple[int, str]]:
    """Run both pods of an attempt to their ends; return the exit code and output of each."""
    hosts, port, pods = folder / "hosts", free_port(), []
    names = [f"llama-node-0-{node}" for node in (0, 1)]
    hosts.write_text("".join(f"127.0.0.1 {name}.llama {name}\n" for name in ["localhost", *names]))
    for node, name in enumerate(names):
        own = folder / f"{attempt}.{node}"  # a new pod has new disks
        own.mkdir()
        variables = TRAINJOB | JOBSET_LABELS | {
            "HOSTNAME": name, "JOB_COMPLETION_INDEX": str(node), "PET_NODE_RANK": str(node),
            "PET_NPROC_PER_NODE": "1", "PET_MASTER_PORT": str(port),
            "JOBSET_NAME": "llama", "JOBSET_RESTART_ATTEMPT": str(attempt), "HOSTS": str(hosts),
            "POD_NAME": f"{name}-x7k2{attempt}", "NODE_NAME": f"gpu-{7 + node}.example",
        }  # fmt: skip
        environ = environment(own, server, **variables)
        del environ["RANKSCOPE_RUN_ID"]  # the job names it
        command = [*POD, *RUN, PYTHON, "-m", "torch.distributed.run", SCRIPT]
        pods.append(
            subprocess.Popen(
                command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    outputs = [pod.communicate(timeout=200)[0] for pod in pods]
    return [(pod.returncode, output) for pod, output in zip(pods, outputs, strict=True)]


def test_two_attempts_of_a_trainjob_are_attempts_of_one_run(
    tmp_path: Path, server: ServerProcess
) -> None:
    first = start_pods(server, tmp_path, 0)
    assert [code for code, _ in first] == [1, 1], first
    assert all(f"/runs/{RUN_ID}" in output for _, output in first)
    run = Watched(server, tmp_path, RUN_ID)
    run.log.write_text("".join(output for _, output in first))
    run.until(lambda: run.get().get("run", {}).get("status") == "failed", 30)
    again = start_pods(server, tmp_path, 1)
    assert [code for code, _ in again] == [0, 0], again
    run.log.write_text("".join(output for _, output in again))
    run.until(lambda: run.get()["run"]["status"] == "ended", 30)
    known, attempts = run.get()["run"], run.get()["attempts"]
    assert known["tags"] == {"kubernetes": "team-a/llama"}
    assert (known["name"], known["launcher"]) == ("kubernetes_job.py", "torchrun")
    assert (known["world_size"], [each["attempt"] for each in attempts]) == (2, [0, 1])
    assert [each["step_hi"] for each in attempts] == [
        kubernetes_job.FAILS_AFTER + 1, kubernetes_job.STEPS,
    ]  # fmt: skip
    for attempt, ended in ((0, False), (1, True)):
        ranks = run.get(f"/ranks?attempt={attempt}")["ranks"]
        assert [(row["rank"], row["node_rank"], row["host"]) for row in ranks] == [
            (0, 0, "llama-node-0-0"), (1, 1, "llama-node-0-1"),
        ]  # fmt: skip
        assert [row["exit_text"] == "ended cleanly" for row in ranks] == [ended] * 2
    facts = run.get("/environment?attempt=1")
    (pods,) = (each for each in facts["differences"] if each["fact"] == "env.POD_NAME")
    assert {(each["value"], *each["ranks"]) for each in pods["values"]} == {
        ("llama-node-0-0-x7k21", 0), ("llama-node-0-1-x7k21", 1),
    }  # fmt: skip
    assert {each["severity"] for each in facts["differences"]} == {"info"}
    with contextlib.closing(Client(server.url, "")) as client:
        assert Advising(client, RUN_ID).nodes() == {
            "llama-node-0-0": "gpu-7.example", "llama-node-0-1": "gpu-8.example",
        }  # fmt: skip
