"""What launchers and commands say, with the odd things that people type."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rankscope.preflight.facts import command, launch
from rankscope.preflight.system import System
from tests.platforms import AZURE_MPI, AZURE_PYTORCH, HOROVOD, SAGEMAKER, SKYPILOT

WORKER = {
    "MASTER_ADDR": "node0", "MASTER_PORT": "29511", "RANK": "5", "WORLD_SIZE": "6",
    "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "2", "GROUP_WORLD_SIZE": "3",
    "TORCHELASTIC_RUN_ID": "job7",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "12", "SLURM_PROCID": "3", "SLURM_NODEID": "1", "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
}  # fmt: skip


def read(environ: dict[str, str], argv: str = "", root: Path = Path("/nowhere")) -> Any:
    return launch.collect(System(root=root, environ=environ), argv.split())


def of_command(argv: list[str]) -> Any:
    """Return what a command alone says, where the environment holds nothing."""
    return launch.collect(System(root=Path("/nowhere"), environ={}), argv)


def test_a_rank_of_torchrun_knows_all() -> None:
    facts = read(WORKER)
    assert (facts.launcher, facts.master_addr, facts.master_port) == ("torchrun", "node0", 29511)
    assert (facts.node_rank, facts.num_nodes, facts.nproc_per_node) == (2, 3, 2)
    assert (facts.rank, facts.local_rank, facts.world_size) == (5, 1, 6)
    assert facts.rendezvous_id == "job7"
    assert not facts.errors


def test_pet_variables_are_defaults_of_torchrun() -> None:
    facts = read({"PET_NNODES": "2:4", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "head"})
    assert (facts.launcher, facts.mode) == ("torchrun", "c10d")
    assert (facts.min_nodes, facts.num_nodes) == (2, 4)
    assert (facts.master_addr, facts.master_port) == ("head", launch.C10D_DEFAULT_PORT)
    assert facts.node_rank is None


@pytest.mark.parametrize(
    ("argv", "is_host"),
    [
        ("torchrun --rdzv-backend c10d --rdzv-conf join_timeout=60,is_host=1 t.py", True),
        ("torchrun --rdzv-backend c10d --rdzv-conf is_host=False t.py", False),
        ("torchrun --rdzv-backend c10d --rdzv-conf is_hosted=1 t.py", None),
        ("torchrun --rdzv-backend c10d t.py", None),
    ],
)
def test_who_hosts_the_store_may_be_said(argv: str, is_host: bool | None) -> None:
    assert read({}, argv).is_store_host is is_host


def test_the_name_of_a_node_among_those_of_a_rendezvous() -> None:
    environ = {"PET_NNODES": "2", "PET_RDZV_BACKEND": "c10d", "PET_LOCAL_ADDR": "10.0.0.1"}
    assert read(environ).local_addr == "10.0.0.1"
    assert read({}, "torchrun --local-addr a --rdzv-backend c10d t.py").local_addr == "a"


def test_an_option_wins_over_its_variable() -> None:
    facts = read({"PET_NNODES": "2", "PET_MASTER_ADDR": "a"}, "torchrun --nnodes 3 train.py")
    assert facts.num_nodes == 3
    assert facts.master_addr == "a"
    assert {"--nnodes", "PET_MASTER_ADDR"} <= set(facts.read_from)


def test_slurm_tells_ranks_and_the_first_node() -> None:
    facts = read(SLURM)
    assert (facts.launcher, facts.mode, facts.master_addr) == ("slurm", "env", "gpu07")
    assert (facts.rank, facts.world_size, facts.node_rank, facts.num_nodes) == (3, 4, 1, 2)
    assert (facts.nproc_per_node, facts.local_rank) == (2, 1)


def test_slurm_with_uneven_tasks_tells_no_number_per_node() -> None:
    facts = read({**SLURM, "SLURM_TASKS_PER_NODE": "3,1"})
    assert facts.nproc_per_node is None
    assert not facts.errors


def test_torchrun_under_slurm_is_read_from_the_command() -> None:
    facts = read(SLURM, "torchrun --nnodes=2 --nproc-per-node=8 --master-addr gpu07 t.py")
    assert (facts.launcher, facts.mode, facts.nproc_per_node) == ("slurm", "static", 8)
    assert facts.world_size is None  # SLURM_NTASKS counts torchruns, not ranks


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4",
          "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (3, 4, 1)),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
         (3, 4, 1)),
        ({"PMIX_RANK": "3"}, (3, None, None)),
    ],
)  # fmt: skip
def test_mpi(environ: dict[str, str], expected: tuple[int | None, ...]) -> None:
    facts = read(environ)
    assert (facts.launcher, facts.mode) == ("mpi", "env")
    assert (facts.rank, facts.world_size, facts.node_rank) == expected


def test_horovodrun_says_ranks_and_nodes() -> None:
    facts = read(HOROVOD)
    assert (facts.launcher, facts.mode, facts.master_addr) == ("horovod", "env", "")
    assert (facts.rank, facts.world_size, facts.local_rank) == (5, 8, 1)
    assert (facts.node_rank, facts.num_nodes, facts.nproc_per_node) == (1, 2, 4)


def test_azure_ml_counts_nodes_and_so_ranks_of_each() -> None:
    facts = read(AZURE_PYTORCH | {"AZUREML_NODE_COUNT": "2"})
    assert (facts.launcher, facts.mode, facts.master_addr) == ("env", "env", "10.0.0.4")
    assert (facts.node_rank, facts.num_nodes, facts.nproc_per_node) == (1, 2, 4)
    assert read(AZURE_PYTORCH).num_nodes is None
    facts = read(AZURE_MPI)
    assert (facts.launcher, facts.node_rank, facts.num_nodes) == ("mpi", 1, 2)


def test_sagemaker_lists_its_hosts() -> None:
    facts = read(SAGEMAKER)
    assert (facts.launcher, facts.node_rank, facts.num_nodes) == ("hand", 1, 2)
    assert read(SAGEMAKER, "torchrun --nnodes 1 train.py").num_nodes == 1


def test_skypilot_numbers_its_nodes() -> None:
    facts = read(SKYPILOT)
    assert (facts.launcher, facts.node_rank, facts.num_nodes) == ("hand", 1, 2)
    assert {"SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK"} <= set(facts.read_from)


def test_kubernetes_counts_pods() -> None:
    facts = read({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2",
                  "MASTER_ADDR": "train-0.train"})  # fmt: skip
    assert (facts.launcher, facts.node_rank, facts.master_addr) == (
        "kubernetes", 2, "train-0.train",
    )  # fmt: skip


def test_an_address_alone_is_no_launch() -> None:
    facts = read({"MASTER_ADDR": "node0"})
    assert (facts.launcher, facts.master_addr) == ("hand", "node0")


@pytest.mark.parametrize(
    ("environ", "argv", "name", "host"),
    [
        ({"MASTER_ADDR": "node0 "}, "", "MASTER_ADDR", "node0"),
        ({"MASTER_ADDR": " 10.77.0.1"}, "", "MASTER_ADDR", "10.77.0.1"),
        ({"MASTER_ADDR": "node 0"}, "", "MASTER_ADDR", ""),
        ({"PET_NNODES": "2", "PET_MASTER_ADDR": "node0\n"}, "", "PET_MASTER_ADDR", "node0"),
        ({}, "torchrun|--nnodes|2|--master-addr|node0 |t.py", "--master-addr", "node0"),
        ({}, "torchrun|--nnodes|2|--master-addr|node 0|t.py", "--master-addr", ""),
        ({}, "torchrun|--rdzv-backend|c10d|--rdzv-endpoint| node0:1|--nnodes|2|t",
         "--rdzv-endpoint", "node0"),
    ],
)  # fmt: skip
def test_a_blank_in_the_address_is_an_error(
    environ: dict[str, str], argv: str, name: str, host: str
) -> None:
    system = System(root=Path("/nowhere"), environ=environ)
    facts = launch.collect(system, argv.split("|") if argv else ())
    assert facts.master_addr == host
    assert [error for error in facts.errors if error.startswith(f"{name}=")]
    assert all(error.endswith("has a blank in it") for error in facts.errors)
    assert facts.launcher != "env"  # an address alone is no launch


def test_plain_variables_are_a_launch() -> None:
    facts = read({"MASTER_ADDR": "n", "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "2"})
    assert (facts.launcher, facts.mode, facts.node_rank, facts.master_port) == ("env", "env", 0, 1)


@pytest.mark.parametrize("text", ["x", "", "2.0", "1e3", "0x10", "²", "10\n20"])
def test_what_is_no_integer_is_an_error(text: str) -> None:
    facts = read({"RANK": "0", "WORLD_SIZE": text})
    assert facts.world_size is None
    assert facts.errors == (f"WORLD_SIZE={text} is no integer",)


@pytest.mark.parametrize("text", ["-1", " 3 ", "007"])
def test_odd_integers_are_integers(text: str) -> None:
    assert read({"RANK": text}).rank == int(text)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torchrun --nnodes 3 --node_rank=1 --master-addr n0 --master_port 1234 t.py --nnodes 9",
         dict(num_nodes=3, node_rank=1, master_addr="n0", master_port=1234, mode="static")),
        ("python -m torch.distributed.run --nnodes=2 --nproc_per_node 4 t.py",
         dict(num_nodes=2, nproc_per_node=4, master_addr="127.0.0.1", node_rank=0)),
        ("/opt/venv/bin/torchrun --rdzv-backend=c10d --rdzv-endpoint=[fd00::1]:1 --nnodes 1:8 t",
         dict(master_addr="fd00::1", master_port=1, min_nodes=1, num_nodes=8, mode="c10d")),
        ("torchrun --rdzv_backend c10d --rdzv_endpoint fd00::1 --nnodes 2 t.py",
         dict(master_addr="fd00::1", master_port=29400)),
        ("torchrun --rdzv-backend c10d --nnodes 2 --master-addr n0 t.py",
         dict(master_addr="localhost", master_port=29400)),  # --master-addr is not read then
        ("torchrun --standalone --nproc-per-node gpu t.py",
         dict(num_nodes=1, master_addr="localhost", mode="c10d", nproc_per_node=None)),
        ("srun -N 2 --ntasks-per-node=1 torchrun --nnodes 2 --rdzv-id 7 t.py",
         dict(num_nodes=2, rendezvous_id="7")),
        ("mpirun -np 2 -x A=b env X=1 torchrun --nnodes 2 t.py", dict(num_nodes=2)),
        ("torchrun -t 3 -m --nnodes 2 package.train", dict(num_nodes=2)),
        ("torchrun --nnodes 2 -- --odd.py --nnodes 5", dict(num_nodes=2)),
        ("torchrun --nn 2 --rdzv-e n0:5 --rdzv-b static t.py",
         dict(num_nodes=2, master_addr="n0", master_port=5)),
        ("torchrun", dict(num_nodes=1, nproc_per_node=1, node_rank=0)),
    ],
)  # fmt: skip
def test_commands(line: str, expected: dict[str, object]) -> None:
    facts = of_command(line.split())
    assert facts.launcher == "torchrun"
    assert not facts.errors
    assert {name: getattr(facts, name) for name in expected} == expected


def test_a_command_within_a_shell() -> None:
    facts = of_command(["bash", "-c", "cd /x && torchrun --nnodes 4 --node-rank 2 t.py"])
    assert (facts.num_nodes, facts.node_rank) == (4, 2)


@pytest.mark.parametrize(
    "argv",
    [["python", "train.py"], [], ["bash", "-c", "echo 'torchrun "], ["train", "torchrun.txt"]],
)
def test_other_commands_say_nothing(argv: list[str]) -> None:
    assert command.find_torchrun(argv, {}) is None
    assert of_command(argv).launcher == "hand"


def test_what_is_no_integer_in_a_command_is_an_error() -> None:
    facts = of_command("torchrun --nproc-per-node 0x2 --from-torch-3 t.py".split())
    assert facts.errors == ("--nproc-per-node=0x2 is no integer",)


def test_what_a_shell_works_out_comes_from_the_environment_or_stays_open() -> None:
    line = (
        "torchrun --nnodes=$SLURM_NNODES --node-rank ${SLURM_NODEID} "
        "--master-addr $(scontrol show hostnames | head -n 1) --master-port $PORT "
        "--rdzv-id `date` t.py"
    )
    facts = launch.collect(System(root=Path("/nowhere"), environ=SLURM), ["bash", "-c", line])
    assert (facts.num_nodes, facts.node_rank) == (2, 1)
    assert (facts.master_addr, facts.rendezvous_id, facts.errors) == (
        "",
        "",
        (),
    )  # never torchrun's default, 127.0.0.1
    open_ones = of_command(["bash", "-c", line])
    assert (open_ones.num_nodes, open_ones.node_rank, open_ones.errors) == (None, None, ())


def test_a_variable_of_torchrun_that_is_about_logs_is_no_launch() -> None:
    assert read({"PET_LOG_DIR": "/tmp/x"}).launcher == "hand"


def test_options_are_those_of_the_installed_torchrun() -> None:
    code = (
        "from torch.distributed.run import get_args_parser as p\n"
        "for a in p()._actions:\n"
        "  n = [o[2:].replace('_', '-') for o in a.option_strings if o.startswith('--')]\n"
        "  if n and n[0] != 'help': print(n[0], a.nargs == 0)\n"
    )
    pytest.importorskip("torch")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rows = [line.split() for line in out.stdout.splitlines()]
    assert len(rows) > 20
    for name, is_switch in rows:
        assert name in (command._SWITCHES if is_switch == "True" else command._VALUES), name


@pytest.mark.parametrize(
    ("text", "first"),
    [("a[03-05,9],b", "a03"), ("n1", "n1"), ("n1,n2", "n1"), ("x[1]-ib", "x1-ib"), ("", "")],
)
def test_the_first_node_of_a_list(text: str, first: str) -> None:
    assert launch.first_node(text) == first


def test_variables_travel_without_secrets(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text("NCCL_DEBUG=INFO\npassword=hunter2\n")
    facts = read(
        {"NCCL_DEBUG": "INFO", "TORCH_API_TOKEN": "abc", "PATH": "/bin", "FI_X": "s" * 9000,
         "NCCL_Y": "https://bob:hunter2@host/x"},
        root=tmp_path,
    )  # fmt: skip
    assert set(facts.environment) == {"NCCL_DEBUG", "TORCH_API_TOKEN", "FI_X", "NCCL_Y"}
    assert facts.environment["TORCH_API_TOKEN"] == "***"
    assert "hunter2" not in repr(facts)
    assert len(facts.environment["FI_X"]) < 1000
    assert "NCCL_DEBUG=INFO" in facts.conf_files["/etc/nccl.conf"]
