"""Who takes part, and which of them is this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rankscope.preflight.exchange.discover import Asked, Discovery, agreed, discover, expected
from rankscope.preflight.facts import launch as facts_of_launch
from rankscope.preflight.facts.launch import Launcher, LaunchFacts
from rankscope.preflight.system import RESOLVE_LIMIT_S, Resolved, System
from tests.platforms import AZURE_PYTORCH, HOROVOD, SAGEMAKER, SKYPILOT


@dataclass(frozen=True)
class Recorded(System):
    """A machine with a name, addresses and a resolver of its own."""

    name: str = "node1"
    own: tuple[str, ...] = ("127.0.0.1", "10.0.0.1")
    hosts: Mapping[str, str] = field(default_factory=dict)

    def hostname(self) -> str:
        return self.name

    def addresses(self) -> tuple[str, ...]:
        return self.own

    def resolve(self, name: str, limit_s: float = RESOLVE_LIMIT_S) -> Resolved:
        known = self.hosts.get(name)
        return Resolved(name=name, addresses=(known,) if known else ())


HOSTS = {f"node{n}": f"10.0.0.{n}" for n in range(4)}
NODES = ("node0", "node1", "node2")


def found(
    environ: Mapping[str, str] | None = None,
    launch: LaunchFacts | None = None,
    asked: Asked | None = None,
    name: str = "node1",
    own: tuple[str, ...] = ("127.0.0.1", "10.0.0.1"),
    hosts: Mapping[str, str] = HOSTS,
) -> Discovery:
    system = Recorded(environ=environ or {}, name=name, own=own, hosts=hosts)
    return discover(system, asked or Asked(), launch or LaunchFacts())


def test_by_hand_the_own_name_tells_who_this_is() -> None:
    seen = found(asked=Asked(nodes=NODES))
    assert (seen.nodes, seen.me, seen.node_rank, seen.master_addr) == (NODES, "node1", 1, "node0")
    assert (seen.num_nodes, seen.master_port, seen.how, seen.errors) == (3, 29500, "--nodes", ())


@pytest.mark.parametrize("name", ["node1.cluster.local", "NODE1"])
def test_the_domain_and_capitals_do_not_matter(name: str) -> None:
    assert found(asked=Asked(nodes=NODES), name=name).me == "node1"


def test_an_unknown_name_is_told_by_its_address() -> None:
    assert found(asked=Asked(nodes=NODES), name="ip-10-0-0-1").me == "node1"
    assert found(
        asked=Asked(nodes=("10.0.0.0", "10.0.0.1")), hosts={"10.0.0.1": "10.0.0.1"}
    ).me == ("10.0.0.1")


def test_a_loopback_address_tells_nobody() -> None:
    hosts = dict.fromkeys(NODES, "127.0.1.1")
    seen = found(
        asked=Asked(nodes=NODES), name="laptop", own=("127.0.0.1", "127.0.1.1"), hosts=hosts
    )
    assert "--node NAME" in seen.errors[0]
    assert "laptop" in seen.errors[0]


def test_two_names_of_this_machine_are_a_question_not_a_guess() -> None:
    hosts = {**HOSTS, "node2": "10.0.0.1"}
    seen = found(asked=Asked(nodes=NODES), name="laptop", hosts=hosts)
    assert "node1, node2 all have its address" in seen.errors[0]


def test_what_was_said_outranks_what_is_seen() -> None:
    assert found(asked=Asked(nodes=NODES, node="node2")).me == "node2"
    assert "not among the nodes" in found(asked=Asked(nodes=NODES, node="node7")).errors[0]
    assert "twice" in found(asked=Asked(nodes=("a", "b", "a"))).errors[0]


def test_a_duplicate_address_does_not_change_who_this_is() -> None:
    # node2 has node1's address: its own name still tells, and the finding must name it
    seen = found(asked=Asked(nodes=NODES), name="node2", own=("10.0.0.1",))
    assert seen.me == "node2"


def test_a_wrong_node_rank_does_not_change_who_this_is() -> None:
    seen = found(asked=Asked(nodes=NODES), launch=LaunchFacts(node_rank=0))
    assert (seen.me, seen.node_rank) == ("node1", 0)


def test_a_cloned_name_is_told_apart_by_rank_and_address() -> None:
    seen = found(asked=Asked(nodes=NODES), launch=LaunchFacts(node_rank=1), name="node0")
    assert (seen.me, seen.node_rank) == ("node1", 1)


def test_a_host_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("node0 slots=8\nnode1 slots=8\n")
    seen = found(asked=Asked(hostfile=str(path)))
    assert (seen.nodes, seen.me, seen.how) == (("node0", "node1"), "node1", "--hostfile")
    assert "cannot be read" in found(asked=Asked(hostfile=str(tmp_path / "none"))).errors[0]
    path.write_text("# nobody\n")
    assert "names no host" in found(asked=Asked(hostfile=str(path))).errors[0]


def slurm(**more: str) -> dict[str, str]:
    return {
        "SLURM_JOB_NODELIST": "node[0-2]", "SLURM_NODEID": "1", "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0", "SLURMD_NODENAME": "node1", **more,
    }  # fmt: skip


def test_under_srun() -> None:
    launch = LaunchFacts(launcher="slurm", node_rank=1, num_nodes=3)
    seen = found(slurm(), launch, name="other-name")
    assert (seen.nodes, seen.me, seen.node_rank) == (NODES, "node1", 1)
    assert found(slurm(SLURM_STEP_NODELIST="node[1-2]"), launch).nodes == ("node1", "node2")
    assert "brackets" in found(slurm(SLURM_JOB_NODELIST="node[0-"), launch).errors[0]


def test_in_an_allocation_without_srun_the_remedy_is_named() -> None:
    environ = {"SLURM_JOB_NODELIST": "node[0-2]"}
    for launcher in ("slurm", "hand", "env"):  # without srun there is no sign of a step
        seen = found(environ, LaunchFacts(launcher=launcher))  # type: ignore[arg-type]
        assert "srun --ntasks-per-node=1 rankscope preflight" in seen.errors[0]
    one = found({"SLURM_JOB_NODELIST": "node1"}, LaunchFacts(launcher="slurm"))
    assert (one.nodes, one.errors) == (("node1",), ())


# Slurm 22.05 and Open MPI 4.1, `sbatch -N3 --ntasks-per-node=2`: of the script, of srun in it, and
# of two ranks of mpirun in it. mpirun has its own daemons started by srun, but on its own node.
_JOB = {"SLURM_JOB_ID": "6", "SLURM_JOB_NODELIST": "node[0-2]", "SLURM_NODELIST": "node[0-2]",
        "SLURM_JOB_NUM_NODES": "3", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
        "SLURM_PROCID": "0"}  # fmt: skip
_SCRIPT = {**_JOB, "SLURM_NTASKS": "6", "SLURM_TASKS_PER_NODE": "2(x3)", "SLURMD_NODENAME": "node0"}
_MPI_0 = {**_SCRIPT, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "6",
          "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}  # fmt: skip
_MPI_2 = {**_JOB, "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node[1-2]",
          "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2",
          "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_TASKS_PER_NODE": "1(x2)",
          "SLURMD_NODENAME": "node1", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "6",
          "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}  # fmt: skip


def seen_by(environ: Mapping[str, str], name: str, argv: str = "") -> Discovery:
    machine = Recorded(environ=environ, name=name, hosts=HOSTS)
    return discover(machine, Asked(), facts_of_launch.collect(machine, argv.split()))


def test_mpirun_in_a_job_of_slurm_has_its_own_numbers() -> None:
    for environ, name, rank in ((_MPI_0, "node0", 0), (_MPI_2, "node1", 1)):
        seen = seen_by(environ, name)
        assert (seen.nodes, seen.me, seen.node_rank, seen.errors) == (NODES, name, rank, ())
    other = {**_MPI_2, "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    assert "OMPI_COMM_WORLD_LOCAL_RANK=1" in seen_by(other, "node1").stands_aside


def test_mpirun_that_fills_not_all_nodes_of_the_job() -> None:
    seen = seen_by({**_MPI_0, "OMPI_COMM_WORLD_SIZE": "4"}, "node0")
    assert (seen.nodes, seen.errors) == (("node0", "node1"), ())


def test_torchrun_below_mpirun_in_a_job_of_slurm() -> None:
    seen = seen_by(_MPI_2, "node1", "torchrun --nnodes 3 --rdzv-backend c10d --rdzv-endpoint node0")
    assert (seen.nodes, seen.me, seen.node_rank, seen.errors) == (NODES, "node1", 1, ())


@pytest.mark.parametrize(
    "argv", ["", "torchrun --nnodes 3 t.py", "torchrun --nnodes 3 --rdzv-backend c10d t.py"]
)
def test_a_batch_script_runs_on_one_node_though_it_has_numbers(argv: str) -> None:
    assert "start it with `srun" in seen_by(_SCRIPT, "node0", argv).errors[0]
    shell = {**_SCRIPT, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1",
             "SLURM_STEP_NODELIST": "node0"}  # fmt: skip
    assert "start it with `srun" in seen_by(shell, "node0", argv).errors[0]
    step = {**_JOB, "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "3",
            "SLURM_STEP_NODELIST": "node[0-2]", "SLURMD_NODENAME": "node0"}  # fmt: skip
    seen = seen_by(step, "node0", argv)
    assert (seen.nodes, seen.me, seen.node_rank, seen.errors) == (NODES, "node0", 0, ())


def test_a_batch_script_may_start_torchrun_on_its_own_node_alone() -> None:
    seen = seen_by(_SCRIPT, "node0", "torchrun --nproc-per-node 2 t.py")
    assert (seen.nodes, seen.errors) == (("node0",), ())


def test_torchrun_inside_of_slurm_has_names_and_its_own_numbers() -> None:
    environ = slurm(LOCAL_RANK="0", GROUP_RANK="2")
    del environ["SLURMD_NODENAME"]
    seen = found(environ, LaunchFacts(launcher="torchrun", node_rank=2, num_nodes=3))
    assert (seen.me, seen.node_rank) == ("node1", 2)


@pytest.mark.parametrize(
    "name", ["LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"]
)
def test_only_local_rank_0_takes_part(name: str) -> None:
    assert f"{name}=3" in found({name: "3"}).stands_aside
    assert found({name: "0"}).stands_aside == ""


@pytest.mark.parametrize("launcher", ["torchrun", "mpi", "env"])
def test_where_nobody_names_the_nodes_they_meet_at_the_master(launcher: Launcher) -> None:
    launch = LaunchFacts(
        launcher=launcher, master_addr="10.0.0.0", master_port=1234, num_nodes=3, node_rank=2
    )
    seen = found(launch=launch)
    assert (seen.nodes, seen.me, seen.node_rank, seen.num_nodes) == ((), "node1", 2, 3)
    assert (seen.master_addr, seen.master_port, seen.errors) == ("10.0.0.0", 1234, ())
    assert expected(seen, {}) == ("node-rank-0", "node-rank-1", "node-rank-2")
    assert expected(seen, {"b": 1, "a": 0}) == ("a", "b", "node-rank-2")
    assert expected(seen, {"b": 1, "c": 1, "z": 9}) == ("node-rank-0", "b", "c", "node-rank-2", "z")


def test_the_node_rank_follows_from_the_rank() -> None:
    launch = LaunchFacts(master_addr="a", rank=9, nproc_per_node=4, world_size=12)
    seen = found(launch=launch)
    assert (seen.node_rank, seen.num_nodes, seen.errors) == (2, 3, ())


def test_ranks_without_local_numbers_are_nodes() -> None:
    seen = found(launch=LaunchFacts(master_addr="job-master-0", rank=2, world_size=3))
    assert (seen.node_rank, seen.num_nodes, seen.errors) == (2, 3, ())


@pytest.mark.parametrize(("name", "rank"), [("node0", 0), ("node1", -1), ("node2", -1)])
def test_under_c10d_only_the_one_with_the_endpoint_has_a_rank(name: str, rank: int) -> None:
    launch = LaunchFacts(launcher="torchrun", mode="c10d", master_addr="node0", num_nodes=3)
    seen = found(launch=launch, name=name, own=("127.0.0.1", HOSTS[name]))
    assert (seen.me, seen.node_rank, seen.num_nodes, seen.errors) == (name, rank, 3, ())
    assert expected(seen, {name: rank}) == {
        "node0": ("node0", "node-rank-1", "node-rank-2"),
        "node1": ("node-rank-0", "node1", "node-rank-2"),
        "node2": ("node-rank-0", "node2", "node-rank-2"),
    }[name]  # fmt: skip
    assert expected(seen, {"node2": -1, "node1": -1, "node0": 0}) == NODES
    assert len(expected(seen, {"a": -1, "b": -1, "c": -1, "d": -1})) == 5


def test_what_is_missing_is_named_with_the_remedy() -> None:
    assert "MASTER_ADDR=NODE0" in found(launch=LaunchFacts(num_nodes=3, node_rank=0)).errors[0]
    ranks = LaunchFacts(master_addr="node0", rank=4, local_rank=0, world_size=8)
    assert "LOCAL_WORLD_SIZE" in found(launch=ranks).errors[0]
    assert "NNODES" in found(launch=LaunchFacts(node_rank=1, master_addr="node0")).errors[0]


def test_alone() -> None:
    seen = found()
    assert (seen.nodes, seen.me, seen.node_rank, seen.errors) == (("node1",), "node1", 0, ())
    assert found(launch=LaunchFacts(master_addr="127.0.0.1")).nodes == ("node1",)


@pytest.mark.parametrize(
    ("master", "name", "nodes"),
    [
        ("train-0.svc", "train-1", ("train-0.svc", "train-1.svc", "train-2.svc")),
        (
            "train-master-0",
            "train-worker-0",
            ("train-master-0", "train-worker-0", "train-worker-1"),
        ),
        (
            "set-job-0-0.sub",
            "set-job-0-1",
            ("set-job-0-0.sub", "set-job-0-1.sub", "set-job-0-2.sub"),
        ),
        ("train-0.svc", "else-1", ()),
        ("node0", "node1", ()),
    ],
)
def test_pods_are_named_by_their_number(master: str, name: str, nodes: tuple[str, ...]) -> None:
    launch = LaunchFacts(launcher="kubernetes", master_addr=master, num_nodes=3, node_rank=1)
    seen = found(launch=launch, name=name)
    assert seen.nodes == nodes
    assert seen.me == (nodes[1] if nodes else name)
    assert seen.errors == ()


def test_lists_are_the_same_however_they_are_spelt() -> None:
    seen = found(asked=Asked(nodes=("Node0", "NODE1", "node2"), node="NODE1"))
    assert (seen.nodes, seen.me, seen.errors) == (NODES, "node1", ())
    kept = found({"SLURM_JOB_NODELIST": "Node[0-1]"}, asked=Asked(nodes=("Node0", "Node1")))
    assert kept.nodes == ("Node0", "Node1")  # Slurm's --exclude knows capitals


def test_localhost_is_no_name_among_others() -> None:
    seen = found(asked=Asked(nodes=("localhost", "node1")))
    assert "--nodes names localhost beside other nodes" in seen.errors[0]
    assert "write the name by which the others reach this node" in seen.errors[0]


def test_machines_that_are_all_called_localhost_go_by_their_addresses() -> None:
    launch = LaunchFacts(launcher="env", master_addr="10.0.0.0", num_nodes=3, node_rank=1)
    assert found(launch=launch, name="localhost").me == "10.0.0.1"


def test_the_first_of_the_list_is_not_rank_0_when_it_has_another_rank() -> None:
    launch = LaunchFacts(launcher="env", mode="env", rank=1, master_addr="node0", world_size=3)
    seen = found(launch=launch, asked=Asked(nodes=NODES), name="node0")
    assert (seen.me, seen.node_rank) == ("node0", -1)
    assert found(launch=launch, asked=Asked(nodes=NODES), name="node2").node_rank == 2


@pytest.mark.parametrize(
    ("environ", "launch", "asked", "is_said"),
    [
        ({}, LaunchFacts(master_addr="x", read_from=("MASTER_ADDR",)), Asked(nodes=NODES), True),
        ({}, LaunchFacts(), Asked(nodes=NODES, master_addr="x"), True),
        ({}, LaunchFacts(), Asked(nodes=NODES), False),
        (slurm(), LaunchFacts(launcher="slurm", master_addr="node0", node_rank=1, num_nodes=3,
                              read_from=("SLURM_STEP_NODELIST",)), Asked(), False),
    ],
)  # fmt: skip
def test_whether_master_addr_was_said(
    environ: Mapping[str, str], launch: LaunchFacts, asked: Asked, is_said: bool
) -> None:
    assert found(environ, launch, asked).is_master_said is is_said


def test_all_take_the_list_that_most_were_told() -> None:
    mine = found(asked=Asked(nodes=("node0", "node1")))
    assert agreed(mine, [("node0", "node1"), NODES, NODES]).nodes == NODES
    assert agreed(mine, [("node0", "node1"), NODES]).nodes == NODES  # a tie: the longer one
    assert agreed(mine, [("node0", "node1")]) == mine
    assert agreed(Discovery(num_nodes=2), [NODES, ("a",)]).nodes == ()  # named by nobody here


def test_mpi_inside_of_pbs_reads_its_host_file(tmp_path: Path) -> None:
    path = tmp_path / "nodes"
    path.write_text("node0\nnode0\nnode1\nnode1\n")
    seen = found({"PBS_NODEFILE": str(path)}, LaunchFacts(launcher="mpi", node_rank=1))
    assert (seen.nodes, seen.me, seen.how) == (("node0", "node1"), "node1", "PBS_NODEFILE")


def of_environment(
    environ: Mapping[str, str], argv: str = "", name: str = "elsewhere"
) -> Discovery:
    launch = facts_of_launch.collect(System(root=Path("/nowhere"), environ=environ), argv.split())
    return found(environ, launch, name=name)


@pytest.mark.parametrize("name", ["algo-2", "ip-10-0-1-7"])
def test_sagemaker_names_all_nodes_and_which_one_this_is(name: str) -> None:
    """Also where the container is called otherwise, and whatever torchrun's default says."""
    for argv in ("", "torchrun --nnodes 2 --node-rank 1 --master-addr algo-1 train.py"):
        seen = of_environment(SAGEMAKER, argv, name)
        assert (seen.nodes, seen.me, seen.node_rank) == (("algo-1", "algo-2"), "algo-2", 1)
        assert (seen.master_addr, seen.how, seen.errors) == ("algo-1", "SM_HOSTS", ())


def test_a_torchrun_of_one_node_within_a_job_of_sagemaker_is_alone() -> None:
    seen = of_environment(SAGEMAKER, "torchrun --standalone train.py", "algo-2")
    assert (seen.nodes, seen.num_nodes) == (("algo-2",), 1)


def test_skypilot_lists_the_addresses_of_its_nodes() -> None:
    for argv in ("", "torchrun --nnodes 2 --node-rank 1 --master-addr 10.0.0.4 train.py"):
        seen = of_environment(SKYPILOT, argv, "worker-1")
        assert (seen.nodes, seen.me, seen.node_rank) == (("10.0.0.4", "10.0.0.5"), "10.0.0.5", 1)
        assert (seen.master_addr, seen.how, seen.errors) == ("10.0.0.4", "SKYPILOT_NODE_IPS", ())


def test_a_process_of_azure_ml_meets_at_its_master_and_one_of_a_node_speaks_for_it() -> None:
    environ = AZURE_PYTORCH | {"AZUREML_NODE_COUNT": "2"}
    assert "LOCAL_RANK=1" in of_environment(environ).stands_aside
    seen = of_environment(environ | {"RANK": "4", "LOCAL_RANK": "0"})
    assert (seen.node_rank, seen.num_nodes, seen.master_addr) == (1, 2, "10.0.0.4")
    assert not seen.errors


def test_a_process_of_horovodrun_needs_to_be_given_the_nodes() -> None:
    assert "HOROVOD_LOCAL_RANK=1" in of_environment(HOROVOD).stands_aside
    first = HOROVOD | {"HOROVOD_RANK": "4", "HOROVOD_LOCAL_RANK": "0"}
    assert "give --nodes a,b" in of_environment(first).errors[0]
    seen = of_environment(first | {"MASTER_ADDR": "node0"}, name="node1")
    assert (seen.node_rank, seen.num_nodes, seen.errors) == (1, 2, ())
