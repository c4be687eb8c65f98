"""Which launcher made this process, and the name that it shares with all that it starts.

Each process of a job comes by here, also those that never import torch: what is imported is what
the interpreter has anyway.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # see rankscope/__init__.py
if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping


class Launcher:
    """The variables in which a launcher gives a process its rank; "" where it has none."""

    def __init__(
        self,
        name: str,
        rank: str,
        world_size: str,
        local_rank: str,
        local_world_size: str,
        node_rank: str,
    ) -> None:
        self.name, self.rank, self.world_size = name, rank, world_size
        self.local_rank, self.local_world_size = local_rank, local_world_size
        self.node_rank = node_rank


LAUNCHERS: tuple[Launcher, ...] = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    Launcher(  # Open MPI
        "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE", "",
    ),
    Launcher(  # MVAPICH2
        "mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE", "",
    ),
    # in a batch script SLURM_PROCID is there too, SLURM_STEP_NUM_TASKS only in what srun started
    Launcher(
        "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID",
    ),
    # MPICH and Intel MPI
    Launcher("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ""),
    Launcher(  # with gloo; with MPI it is mpirun
        "horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE",
        "HOROVOD_CROSS_RANK",
    ),
)  # fmt: skip


class Platform:
    """Who runs jobs, and the variable that names one on all of its nodes."""

    def __init__(self, name: str, job: str) -> None:
        self.name, self.job = name, job


PLATFORMS: tuple[Platform, ...] = (
    Platform("slurm", "SLURM_JOB_ID"),
    Platform("sagemaker", "TRAINING_JOB_NAME"),
    Platform("azureml", "AZUREML_RUN_ID"),
)
FAMILY = "RANKSCOPE_FAMILY"  # names the run where nothing else does
ATTACHED = "RANKSCOPE_ATTACHED"  # pid of the attached rank: its children are not that rank


def name_family(environ: MutableMapping[str, str]) -> None:
    """Give this process and all that it starts a common name, unless it was given one."""
    environ.setdefault(FAMILY, family_name(environ))


def family_name(environ: Mapping[str, str]) -> str:
    """Return the first known process of this family: a launcher that is not Python, or this one."""
    has_siblings = launcher(environ) != "python" or is_child()
    first = os.getppid() if has_siblings else os.getpid()
    return f"{os.uname().nodename}-{first}-{process_start_ticks(first)}"


def job_name(environ: Mapping[str, str]) -> str:
    """Return what all nodes of a job call it, as slurm-1234; empty where no platform says so."""
    for platform in PLATFORMS:
        if job := environ.get(platform.job):
            return f"{platform.name}-{job}"
    return ""


def hosts_of_job(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return all hosts of a job in their order; none where no platform lists them, as SageMaker."""
    hosts = environ.get("SM_HOSTS", "")  # a list in JSON of names in quotes
    return tuple(filter(None, (name.strip(' "') for name in hosts.strip("[] ").split(","))))


def num_nodes_of_job(environ: Mapping[str, str]) -> int | None:
    """Return how many nodes a job has, as the platform gives it; None where none does."""
    number = environ.get("AZUREML_NODE_COUNT", "")
    return int(number) if number.isdecimal() else len(hosts_of_job(environ)) or None


def node_of_job(environ: Mapping[str, str]) -> int | None:
    """Return the number of this node in its job, as the platform gives it; None where none does.

    Azure ML sets NODE_RANK, as others do; SageMaker lists the hosts, and says which is this one.
    """
    number = environ.get("NODE_RANK", "")
    if number.isdecimal():
        return int(number)
    hosts, own = hosts_of_job(environ), environ.get("SM_CURRENT_HOST", "")
    return hosts.index(own) if own in hosts else None


def ranks_of_node(environ: Mapping[str, str], world_size: int) -> int | None:
    """Return how many ranks each node has, where the platform gives all equally many."""
    nodes = num_nodes_of_job(environ)
    return world_size // nodes if nodes and not world_size % nodes else None


def launcher(environ: Mapping[str, str]) -> str:
    """Return which launcher made this process, as far as its variables show."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return "accelerate" if "ACCELERATE_MIXED_PRECISION" in environ else "torchrun"
    if "CROSS_RANK" in environ and "LOCAL_SIZE" in environ:
        return "deepspeed"
    return next((each.name for each in LAUNCHERS if each.rank in environ), "python")


def is_rank(environ: Mapping[str, str]) -> bool:
    """Return whether a process with these variables can only be a rank.

    torchrun and what works like it (accelerate, deepspeed) set LOCAL_RANK beside RANK and
    WORLD_SIZE; without it RANK may be the number of a node whose ranks are yet to be started.
    """
    return "RANK" in environ and "LOCAL_RANK" in environ


def process_start_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since boot, or 0 where it cannot be read.

    With the pid it names a process for good: pids are reused, the pair is not.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return 0
    return int(stat.rpartition(b")")[2].split()[19])


def is_child() -> bool:
    """Return whether `multiprocessing` started this process: its siblings may be ranks like it."""
    multiprocessing = sys.modules.get("multiprocessing")
    return multiprocessing is not None and multiprocessing.parent_process() is not None


def is_inherited(environ: Mapping[str, str]) -> bool:
    """Return whether this process is a rank's child and only inherited the rank's variables."""
    attached = environ.get(ATTACHED, "")
    return bool(attached and attached != str(os.getpid())) or is_child()
