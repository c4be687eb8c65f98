"""Who takes part, from environments as schedulers and operators set them.

Each is what the named project documents or does; nothing of it runs here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rankscope.preflight.exchange.discover import Asked, Discovery, discover
from rankscope.preflight.facts import launch
from rankscope.preflight.start import run_id_of
from rankscope.preflight.system import RESOLVE_LIMIT_S, Done, Resolved, System


@dataclass(frozen=True)
class Node(System):
    """A machine of which the environment, the host name and some files were recorded."""

    name: str = ""
    flux: str = ""
    files: Mapping[str, str] = field(default_factory=dict)

    def hostname(self) -> str:
        return self.name

    def addresses(self) -> tuple[str, ...]:
        return ("127.0.0.1", "10.1.0.9")

    def resolve(self, name: str, limit_s: float = RESOLVE_LIMIT_S) -> Resolved:
        return Resolved(name=name, error="EAI_NONAME")

    def read(self, path: str) -> str | None:
        return self.files.get(path)

    def run(self, argv: Sequence[str], limit_s: float = 5.0) -> Done:
        assert tuple(argv) == ("flux", "hostlist", "--expand", "local")
        return Done(0 if self.flux else 127, out=self.flux)


def seen(node: Node, argv: str = "") -> tuple[Discovery, launch.LaunchFacts]:
    facts = launch.collect(node, argv.split())
    return discover(node, Asked(), facts), facts


KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


def test_indexed_job() -> None:
    """Kubernetes 1.34, tasks/job/job-with-pod-to-pod-communication: hosts are JOB-INDEX.SERVICE."""
    environ = {**KUBERNETES, "JOB_COMPLETION_INDEX": "2", "NNODES": "3",
               "MASTER_ADDR": "example-job-0.headless-svc"}  # fmt: skip
    who, facts = seen(Node(environ=environ, name="example-job-2"))
    assert facts.launcher == "kubernetes"
    assert who.nodes == tuple(f"example-job-{number}.headless-svc" for number in range(3))
    assert (who.me, who.node_rank, who.is_master_said, who.errors) == (
        "example-job-2.headless-svc", 2, True, (),
    )  # fmt: skip


def test_jobset() -> None:
    """JobSet 0.8, examples/simple/jobset-with-network.yaml: SET-REPLICATED-JOB-INDEX.SUBDOMAIN."""
    environ = {**KUBERNETES, "JOB_COMPLETION_INDEX": "1", "NNODES": "2",
               "MASTER_ADDR": "network-jobset-workers-0-0.example"}  # fmt: skip
    who, _ = seen(Node(environ=environ, name="network-jobset-workers-0-1"))
    assert who.nodes == (
        "network-jobset-workers-0-0.example", "network-jobset-workers-0-1.example",
    )  # fmt: skip
    assert (who.node_rank, who.errors) == (1, ())


def pytorchjob(rank: int, **more: str) -> dict[str, str]:
    """training-operator v1, pkg/controller.v1/pytorch/{master,envvar}.go: workers begin at 1."""
    return {**KUBERNETES, "PYTHONUNBUFFERED": "1", "MASTER_PORT": "23456",
            "PET_MASTER_PORT": "23456", "MASTER_ADDR": "bert-master-0",
            "PET_MASTER_ADDR": "bert-master-0", "WORLD_SIZE": "3", "RANK": str(rank),
            "PET_NNODES": "3", "PET_NODE_RANK": str(rank), "PET_NPROC_PER_NODE": "auto",
            **more}  # fmt: skip


@pytest.mark.parametrize(
    ("rank", "name"), [(0, "bert-master-0"), (1, "bert-worker-0"), (2, "bert-worker-1")]
)
def test_pytorchjob_of_the_training_operator(rank: int, name: str) -> None:
    who, facts = seen(Node(environ=pytorchjob(rank), name=name))
    assert who.nodes == ("bert-master-0", "bert-worker-0", "bert-worker-1")
    assert (who.me, who.node_rank, who.master_port) == (name, rank, 23456)
    assert (facts.mode, facts.errors, who.errors) == ("static", (), ())


def test_pytorchjob_whose_master_calls_itself_localhost() -> None:
    """Earlier operators and their forks set MASTER_ADDR=localhost in the master's pod."""
    environ = pytorchjob(0, MASTER_ADDR="localhost", PET_MASTER_ADDR="localhost")
    who, _ = seen(Node(environ=environ, name="bert-master-0"))
    # the names cannot be derived there, but all others call it, and it waits for three
    assert (who.nodes, who.me, who.node_rank, who.num_nodes) == ((), "bert-master-0", 0, 3)


@pytest.mark.parametrize(("nodes", "is_named"), [("3:3", True), ("1:3", False)])
def test_elastic_pytorchjob(nodes: str, is_named: bool) -> None:
    """training-operator v1, pkg/controller.v1/pytorch/elastic.go: no master, c10d at worker 0."""
    environ = {**KUBERNETES, "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "echo-worker-0:23456",
               "PET_NNODES": nodes, "PET_NPROC_PER_NODE": "1"}  # fmt: skip
    who, facts = seen(Node(environ=environ, name="echo-worker-2"))
    # how many pods there are of one to three, no name tells
    names = ("echo-worker-0", "echo-worker-1", "echo-worker-2")
    assert who.nodes == (names if is_named else ())
    assert (who.me, who.master_port, facts.mode) == ("echo-worker-2", 23456, "c10d")
    assert who.errors == ()


def test_trainjob_of_the_trainer_v2() -> None:
    """Trainer v2, pkg/runtime/framework/plugins/torch/torch.go: JOB-node-0-0.JOB, port 29400."""
    environ = {**KUBERNETES, "JOB_COMPLETION_INDEX": "1", "PET_NNODES": "2",
               "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1",
               "PET_MASTER_ADDR": "llama-node-0-0.llama", "PET_MASTER_PORT": "29400"}  # fmt: skip
    who, facts = seen(Node(environ=environ, name="llama-node-0-1"))
    assert who.nodes == ("llama-node-0-0.llama", "llama-node-0-1.llama")
    assert (who.me, who.node_rank, who.master_port) == ("llama-node-0-1.llama", 1, 29400)
    assert (facts.launcher, facts.nproc_per_node) == ("kubernetes", 8)


def mpijob(rank: int, **more: str) -> dict[str, str]:
    """mpi-operator v2beta1: mpirun of Open MPI in the launcher, one process on each worker here."""
    return {**KUBERNETES, "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
            "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile", **more}  # fmt: skip


def hosts(name: str) -> dict[str, str]:
    return {"/etc/hosts": f"127.0.0.1 localhost\n10.1.0.9 {name}.pi.default.svc.x {name}\n"}


@pytest.mark.parametrize(
    ("rank", "name", "nodes"),
    [
        (1, "pi-worker-1", ("pi-worker-0", "pi-worker-1")),
        (1, "pi-worker-0", ("pi-launcher", "pi-worker-0")),  # runLauncherAsWorker
        (0, "pi-launcher", ("pi-launcher", "pi-worker-0")),
    ],
)
def test_mpijob(rank: int, name: str, nodes: tuple[str, ...]) -> None:
    who, facts = seen(Node(environ=mpijob(rank), name=name, files=hosts(name)))
    assert who.nodes == tuple(f"{node}.pi.default.svc.x" for node in nodes)
    assert (who.me, who.node_rank, who.is_master_said) == (f"{name}.pi.default.svc.x", rank, False)
    assert (facts.launcher, who.errors) == ("mpi", ())


def test_mpi_outside_of_kubernetes_derives_no_names() -> None:
    environ = mpijob(1)
    del environ["KUBERNETES_SERVICE_HOST"]
    who, _ = seen(Node(environ=environ, name="gpu-worker-1"))
    assert "--nodes a,b,..." in who.errors[0]


def test_pbs_started_with_pbsdsh() -> None:
    """OpenPBS 23, qsub(1B): PBS_NODEFILE has a line for each slot; pbsdsh sets PBS_NODENUM."""
    environ = {"PBS_JOBID": "1234.server", "PBS_NODEFILE": "/var/spool/pbs/aux/1234.server",
               "PBS_NODENUM": "1", "PBS_TASKNUM": "2", "PBS_ENVIRONMENT": "PBS_BATCH"}  # fmt: skip
    files = {"/var/spool/pbs/aux/1234.server": "cn1.site\ncn1.site\ncn2.site\ncn2.site\n"}
    node = Node(environ=environ, name="cn2", files=files)
    who, _ = seen(node)
    assert (who.nodes, who.me, who.node_rank) == (("cn1.site", "cn2.site"), "cn2.site", 1)
    assert (who.how, run_id_of(node)) == ("PBS_NODEFILE", "1234.server")


@pytest.mark.parametrize(
    "told",
    [
        {"LSB_MCPU_HOSTS": "hostA 2 hostB 2", "LSB_HOSTS": "hostA hostA hostB hostB"},
        {"LSB_HOSTS": "hostA hostA hostB hostB"},
        {"LSB_DJOB_HOSTFILE": "/home/u/.lsbatch/17.hosts"},
    ],
)
def test_lsf_started_with_blaunch(told: dict[str, str]) -> None:
    """LSF 10.1, environment variable reference: hosts with their slots, or one for each slot."""
    files = {"/home/u/.lsbatch/17.hosts": "hostA\nhostA\nhostB\nhostB\n"}
    node = Node(environ={"LSB_JOBID": "17", **told}, name="hostB", files=files)
    who, _ = seen(node)
    assert [name.lower() for name in who.nodes] == ["hosta", "hostb"]
    assert (who.me.lower(), who.node_rank, run_id_of(node)) == ("hostb", 1, "17")


def test_a_launch_on_one_node_of_a_pbs_job_is_alone() -> None:
    environ = {"PBS_JOBID": "1234.server", "PBS_NODEFILE": "/nodes"}
    node = Node(environ=environ, name="cn1", files={"/nodes": "cn1\ncn2\n"})
    assert seen(node, "torchrun --standalone train.py")[0].nodes == ("cn1",)
    assert seen(node, "torchrun --nnodes 2 --node-rank 0 train.py")[0].nodes == ("cn1", "cn2")


def test_lsf_jsrun() -> None:
    """IBM Job Step Manager 10.3: JSM_NAMESPACE_*, as Lightning's LSFEnvironment reads them."""
    environ = {"LSB_JOBID": "17", "LSB_MCPU_HOSTS": "a 1 b 1", "JSM_NAMESPACE_RANK": "1",
               "JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_LOCAL_RANK": "0"}  # fmt: skip
    who, facts = seen(Node(environ=environ, name="b"))
    assert (facts.launcher, facts.rank, facts.world_size) == ("mpi", 1, 2)
    assert (who.nodes, who.me) == (("a", "b"), "b")


def test_flux() -> None:
    """flux-core, flux-environment(7) and flux-hostlist(1): the hosts are known by a command."""
    environ = {"FLUX_JOB_ID": "f3ETxsR9H", "FLUX_JOB_SIZE": "4", "FLUX_JOB_NNODES": "2",
               "FLUX_TASK_RANK": "2", "FLUX_TASK_LOCAL_ID": "0"}  # fmt: skip
    node = Node(environ=environ, name="fluke7", flux="fluke6 fluke7\n")
    who, facts = seen(node)
    assert (facts.rank, facts.world_size, facts.num_nodes) == (2, 4, 2)
    assert (who.nodes, who.me, who.node_rank) == (("fluke6", "fluke7"), "fluke7", 1)
    assert run_id_of(node) == "f3ETxsR9H"
    other = seen(Node(environ={**environ, "FLUX_TASK_LOCAL_ID": "1"}, name="fluke7"))[0]
    assert "FLUX_TASK_LOCAL_ID=1" in other.stands_aside


def test_ray_names_no_nodes() -> None:
    """Ray Train sets the variables of env:// for each worker, with the address of worker 0."""
    environ = {"RAY_ADDRESS": "10.1.0.2:6379", "MASTER_ADDR": "10.1.0.2", "MASTER_PORT": "41233",
               "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
               "NODE_RANK": "1"}  # fmt: skip
    who, facts = seen(Node(environ=environ, name="ray-worker-b"))
    assert (facts.launcher, facts.mode) == ("env", "env")
    assert (who.nodes, who.node_rank, who.num_nodes, who.errors) == ((), 1, 2, ())
    assert (who.master_addr, who.master_port) == ("10.1.0.2", 41233)


def test_a_list_with_a_node_of_a_file_that_is_gone(tmp_path: Path) -> None:
    node = Node(environ={"PBS_JOBID": "1", "PBS_NODEFILE": str(tmp_path / "none")}, name="cn1")
    assert "cannot be read" in seen(node)[0].errors[0]
