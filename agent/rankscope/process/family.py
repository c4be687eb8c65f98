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

    from rankscope.process.kubernetes import Job


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
    """Who runs jobs, and the variables that name one on all of its nodes and number this node."""

    def __init__(self, name: str, job: str, node_rank: str = "", num_nodes: str = "") -> None:
        self.name, self.job = name, job
        self.node_rank, self.num_nodes = node_rank, num_nodes


# Kubernetes has no variable of its own for a job: process/kubernetes.py
KUBERNETES = Platform("kubernetes", "", "PET_NODE_RANK", "PET_NNODES")  # of Kubeflow Trainer
PLATFORMS: tuple[Platform, ...] = (
    # before Slurm and Kubernetes, which it may run on: a job there may have several of its tasks
    Platform("skypilot", "SKYPILOT_TASK_ID", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
    Platform("slurm", "SLURM_JOB_ID"),
    Platform("sagemaker", "TRAINING_JOB_NAME"),
    Platform("azureml", "AZUREML_RUN_ID", "NODE_RANK", "AZUREML_NODE_COUNT"),
    KUBERNETES,
)
# how often a job was begun again as a whole: a requeued one of Slurm (sbatch, "OUTPUT ENVIRONMENT
# VARIABLES"); a JobSet and a job of Volcano, where the manifest asks for it (docs/attach.md)
_RESTARTS = ("SLURM_RESTART_COUNT", "JOBSET_RESTART_ATTEMPT", "VC_JOB_RETRY_COUNT")
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
        if job := _job(platform, environ):
            return f"{platform.name}-{job}"
    return ""


def job_tags(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the job by its platform, as it is looked for there: a label of the run."""
    for platform in PLATFORMS:
        if job := _job(platform, environ):
            return {platform.name: job if isinstance(job, str) else job.path}
    return {}


def _job(platform: Platform, environ: Mapping[str, str]) -> str | Job | None:
    if platform is not KUBERNETES:
        return environ.get(platform.job)
    if "KUBERNETES_SERVICE_HOST" not in environ:
        return None
    from rankscope.process.kubernetes import job_of_pod

    return job_of_pod(environ)


def restarts_of_job(environ: Mapping[str, str]) -> int:
    """Return how often the platform began this job again, 0 where none says so."""
    for name in _RESTARTS:
        number = environ.get(name, "")
        if number.isdecimal():
            return int(number)
    return 0


def hosts_of_job(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return all hosts of a job in their order; none where no platform lists them.

    SageMaker has names in quotes, as JSON, SkyPilot an address a line.
    """
    if addresses := environ.get("SKYPILOT_NODE_IPS"):
        return tuple(addresses.split())
    hosts = environ.get("SM_HOSTS", "")
    return tuple(filter(None, (name.strip(' "') for name in hosts.strip("[] ").split(","))))


def num_nodes_of_job(environ: Mapping[str, str]) -> int | None:
    """Return how many nodes a job has, as the platform gives it; None where none does."""
    for platform in PLATFORMS:
        number = environ.get(platform.num_nodes, "")
        if number.isdecimal():
            return int(number)
    return len(hosts_of_job(environ)) or None


def node_of_job(environ: Mapping[str, str]) -> int | None:
    """Return the number of this node in its job, as the platform gives it; None where none does.

    SageMaker lists the hosts, and says which is this one.
    """
    for platform in PLATFORMS:
        number = environ.get(platform.node_rank, "")
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
    if "RAY_RAYLET_PID" in environ:  # of each process that Ray starts; its ranks have RANK as well
        return "ray"
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
