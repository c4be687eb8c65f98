"""The launch: what the environment and the command say of ranks, nodes and the endpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

import msgspec

from rankscope.preflight.facts.command import Torchrun, find_torchrun
from rankscope.preflight.system import System
from rankscope.process.family import (
    LAUNCHERS,
    PLATFORMS,
    node_of_job,
    num_nodes_of_job,
    ranks_of_node,
)
from rankscope.wire.assigned_secrets import HIDDEN
from rankscope.wire.redaction import cut, redact
from rankscope.wire.secret_names import holds_secret

Launcher = Literal["torchrun", "slurm", "mpi", "horovod", "kubernetes", "env", "hand"]
Mode = Literal["static", "c10d", "env"]  # how the job will meet: it decides what a fault does

DEFAULT_PORT = 29500  # of MASTER_PORT in torchrun
C10D_DEFAULT_PORT = 29400  # of --rdzv-endpoint without a port (torch c10d_rendezvous_backend.py)
COMPARED = (
    "NCCL_", "GLOO_", "TORCH_", "CUDA_", "OMP_", "UCX_", "FI_", "HSA_", "PYTORCH_", "RCCL_",
    "HIP_", "ROCR_", "OFI_NCCL_", "MKL_", "KMP_", "GOMP_",
)  # fmt: skip
_INTERACTIVE_STEP = "4294967290"  # SLURM_INTERACTIVE_STEP, slurm/slurm.h
_MAX_VALUE = 512  # characters of one variable that travel
_MAX_FILE = 4096  # characters of one configuration file that travel


class LaunchFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What this node knows of the launch. None and empty: not known."""

    launcher: Launcher = "hand"
    mode: Mode = "static"
    master_addr: str = ""
    master_port: int = DEFAULT_PORT
    node_rank: int | None = None
    num_nodes: int | None = None  # the most of them, where a range was given
    min_nodes: int | None = None  # None: exactly num_nodes
    nproc_per_node: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    rendezvous_id: str = ""
    rendezvous_backend: str = ""
    local_addr: str = ""  # --local-addr: the name of this node among those of a rendezvous
    is_store_host: bool | None = None  # is_host of --rdzv-conf: c10d need not find it out then
    read_from: tuple[str, ...] = ()  # names of the variables or options that said so
    errors: tuple[str, ...] = ()  # "WORLD_SIZE=x is no integer"
    environment: dict[str, str] = {}  # NCCL_*, GLOO_*, OMP_* ...: what `env.drift` compares
    conf_files: dict[str, str] = {}  # path: text of /etc/nccl.conf, ~/.nccl.conf


_PET = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT", "PET_STANDALONE")


class _Reader:
    """Takes values in order of precedence: the first that says something holds."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.texts: dict[str, str] = {}
        self.numbers: dict[str, int] = {}
        self.read_from: list[str] = []
        self.errors: list[str] = []
        self.blanks: list[str] = []

    def text(self, field: str, *names: str) -> None:
        """Read a text from the first of the variables that is set."""
        for name in names:
            self.given_text(field, name, self.environ.get(name, ""))

    def given_text(self, field: str, name: str, value: str) -> None:
        """Read a text that `name` says."""
        if value and field not in self.texts:
            self.texts[field] = value
            self.read_from.append(name)

    def given_host(self, name: str, value: str) -> None:
        """Read the master's host; a blank in it is an error, and one beside it does not count."""
        host = value.strip()
        if host != value or len(host.split()) > 1:
            self.blanks.append(f"{name}={value[:60]!r} has a blank in it")
        if len(host.split()) == 1:
            self.given_text("master_addr", name, host)

    def number(self, field: str, *names: str) -> None:
        """Read an integer from the first of the variables that is set."""
        for name in names:
            if name in self.environ:
                self.given_number(field, name, self.environ[name])

    def given_number(self, field: str, name: str, value: str) -> None:
        """Read an integer that `name` says; what is none becomes an error."""
        if field in self.numbers:
            return
        if re.fullmatch(r"\s*-?[0-9]+\s*", value):
            self.numbers[field] = int(value)
            self.read_from.append(name)
        else:
            self.errors.append(f"{name}={value[:40]} is no integer")

    def endpoint(self, name: str, text: str, default_port: int) -> None:
        """Read host:port, [address]:port, or a host alone."""
        host, port = _split_endpoint(text)
        self.given_host(name, host)
        if port:
            self.given_number("master_port", name, port)
        elif "master_port" not in self.numbers:
            self.numbers["master_port"] = default_port


def collect(system: System, command: Sequence[str] = ()) -> LaunchFacts:
    """Read the launch. `command`: what is going to be started, for example by the launch gate."""
    from rankscope.preflight.facts import choice

    environ = system.environ
    facts = _read(environ, find_torchrun(command, environ))
    files = {path: cut(redact(text), _MAX_FILE) for path, text in choice.conf_files(system).items()}
    return msgspec.structs.replace(facts, environment=_compared(environ), conf_files=files)


def _read(environ: Mapping[str, str], torchrun: Torchrun | None) -> LaunchFacts:
    reader = _Reader(environ)
    has_pet = any(name in environ for name in _PET)
    mode: Mode
    if "TORCHELASTIC_RUN_ID" in environ and torchrun is None:
        launcher, mode = _worker(reader)
    elif torchrun is not None or has_pet:
        launcher, mode = _torchrun(reader, torchrun or Torchrun())
    else:
        launcher, mode = _plain(reader)
    numbers = reader.numbers
    _derive(numbers)
    return LaunchFacts(
        launcher=launcher,
        mode=mode,
        master_addr=reader.texts.get("master_addr", ""),
        master_port=numbers.get("master_port", DEFAULT_PORT),
        rendezvous_id=reader.texts.get("rendezvous_id", ""),
        rendezvous_backend=reader.texts.get("rendezvous_backend", ""),
        local_addr=reader.texts.get("local_addr", ""),
        is_store_host=_BOOLEANS.get(reader.texts.get("is_host", "")),
        read_from=tuple(dict.fromkeys(reader.read_from)),
        errors=(*reader.errors, *reader.blanks),
        node_rank=numbers.get("node_rank"),
        num_nodes=numbers.get("num_nodes"),
        min_nodes=numbers.get("min_nodes"),
        nproc_per_node=numbers.get("nproc_per_node"),
        rank=numbers.get("rank"),
        local_rank=numbers.get("local_rank"),
        world_size=numbers.get("world_size"),
    )


def _worker(reader: _Reader) -> tuple[Launcher, Mode]:
    """Read what torchrun sets for each of its ranks (torch/distributed/elastic/agent)."""
    reader.given_host("MASTER_ADDR", reader.environ.get("MASTER_ADDR", ""))
    reader.number("master_port", "MASTER_PORT")
    reader.text("rendezvous_id", "TORCHELASTIC_RUN_ID")
    reader.number("rank", "RANK")
    reader.number("world_size", "WORLD_SIZE")
    reader.number("local_rank", "LOCAL_RANK")
    reader.number("node_rank", "GROUP_RANK")
    reader.number("num_nodes", "GROUP_WORLD_SIZE")
    reader.number("nproc_per_node", "LOCAL_WORLD_SIZE")
    return "torchrun", "static"


def _torchrun(reader: _Reader, command: Torchrun) -> tuple[Launcher, Mode]:
    """Read a command of torchrun; what it does not say is in PET_*, or has a default."""
    environ, options = reader.environ, command.options

    def said(option: str) -> tuple[str, str]:
        variable = "PET_" + option.upper().replace("-", "_")
        if option in options:
            return f"--{option}", options[option]
        return variable, environ.get(variable, "")

    is_alone = said("standalone")[1] not in ("", "0")
    backend = said("rdzv-backend")[1] or "static"
    reader.given_text("rendezvous_backend", *said("rdzv-backend"))
    reader.given_text("local_addr", *said("local-addr"))
    reader.given_text("is_host", *_setting("is_host", *said("rdzv-conf")))
    if "rdzv-id" not in command.unread:
        reader.given_text("rendezvous_id", *said("rdzv-id"))
    if "nnodes" not in command.unread:
        _nodes(reader, *said("nnodes"))
    name, nproc = said("nproc-per-node")
    if nproc not in ("gpu", "cpu", "xpu", "auto") and "nproc-per-node" not in command.unread:
        reader.given_number("nproc_per_node", name, nproc or "1")
    if is_alone:
        reader.numbers.update(num_nodes=1, node_rank=0)
        reader.numbers.pop("min_nodes", None)
        reader.given_text("master_addr", "--standalone", "localhost")
        return "torchrun", "c10d"
    _endpoint(reader, said, command.unread, is_static=backend == "static")
    name, node_rank = said("node-rank")
    if node_rank and "node-rank" not in command.unread:
        reader.given_number("node_rank", name, node_rank)
    elif not node_rank and backend == "static":
        reader.numbers["node_rank"] = 0  # its default
    return _outer(environ) or "torchrun", "static" if backend == "static" else "c10d"


def _setting(wanted: str, option: str, text: str) -> tuple[str, str]:
    """Return one setting of --rdzv-conf "a=1,b=2" with the option that says it."""
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name == wanted:
            return option, value.lower()
    return option, ""


_BOOLEANS = {
    **dict.fromkeys(("1", "true", "t", "yes", "y"), True),
    **dict.fromkeys(("0", "false", "f", "no", "n"), False),
}  # as torch reads them (elastic/rendezvous/api.py)


def _endpoint(
    reader: _Reader,
    said: Callable[[str], tuple[str, str]],
    unread: Collection[str],
    is_static: bool,
) -> None:
    """Read where the nodes meet. What only a shell knows is left open, without a default."""
    name, endpoint = said("rdzv-endpoint")
    if endpoint:
        if "rdzv-endpoint" not in unread:
            reader.endpoint(name, endpoint, C10D_DEFAULT_PORT)
        return
    if not is_static:  # torchrun takes neither --master-addr nor --master-port then
        reader.endpoint("--rdzv-endpoint", "localhost", C10D_DEFAULT_PORT)
        return
    name, address = said("master-addr")
    if "master-addr" not in unread:
        reader.given_host(name, address)
        if not address:
            reader.texts.setdefault("master_addr", "127.0.0.1")
    name, port = said("master-port")
    if "master-port" not in unread:
        reader.given_number("master_port", name, port or str(DEFAULT_PORT))


def _nodes(reader: _Reader, name: str, text: str) -> None:
    """Read --nnodes: a number or MIN:MAX."""
    low, colon, high = text.partition(":")
    reader.given_number("num_nodes", name, (high if colon else low) or "1")
    if colon and low != high:
        reader.given_number("min_nodes", name, low)


def _outer(environ: Mapping[str, str]) -> Launcher | None:
    """Return the scheduler that starts torchrun, if one can be seen."""
    if is_of_mpirun(environ):
        return "mpi"
    if "SLURM_JOB_ID" in environ and "SLURM_PROCID" in environ:
        return "slurm"
    return "kubernetes" if "KUBERNETES_SERVICE_HOST" in environ else None


def _plain(reader: _Reader) -> tuple[Launcher, Mode]:
    """Read env:// variables, and what schedulers say where they are not set."""
    environ = reader.environ
    reader.given_host("MASTER_ADDR", reader.environ.get("MASTER_ADDR", ""))
    reader.number("master_port", "MASTER_PORT")
    reader.number("rank", "RANK")
    reader.number("world_size", "WORLD_SIZE")
    reader.number("local_rank", "LOCAL_RANK")
    reader.number("node_rank", "GROUP_RANK", "NODE_RANK")
    reader.number("num_nodes", "NNODES", "NUM_NODES")
    reader.number("nproc_per_node", "LOCAL_WORLD_SIZE")
    if "SLURM_PROCID" in environ and "SLURM_JOB_ID" in environ and not is_of_mpirun(environ):
        _slurm(reader)
        return "slurm", "env"
    if any(name in environ for name in _MPI_RANKS):
        _mpi(reader)
        return "mpi", "env"
    if _HOROVOD.rank in environ:
        _horovod(reader)
        return "horovod", "env"
    _platform(reader)
    if "KUBERNETES_SERVICE_HOST" in environ:
        reader.number("node_rank", "JOB_COMPLETION_INDEX")
        return "kubernetes", "env"
    if {"rank", "world_size"} & set(reader.numbers) or reader.errors:
        return "env", "env"
    return "hand", "static"


def _slurm(reader: _Reader) -> None:
    environ = reader.environ
    reader.number("node_rank", "SLURM_NODEID")
    reader.number("num_nodes", "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    reader.number("rank", "SLURM_PROCID")
    reader.number("world_size", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    reader.number("local_rank", "SLURM_LOCALID")
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        first = environ.get(name, "").partition("(")[0]  # "2(x3)", "2,1": only where all are equal
        if first.isdigit() and "," not in environ[name]:
            reader.given_number("nproc_per_node", name, first)
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        reader.given_text("master_addr", name, first_node(environ.get(name, "")))


_MPIRUN = tuple(row for row in LAUNCHERS if row.name == "mpirun")
(_HOROVOD,) = (row for row in LAUNCHERS if row.name == "horovodrun")
_MPI_RANKS = (  # of MPI itself; PMIx; Flux; LSF's jsrun
    *(row.rank for row in _MPIRUN), "PMIX_RANK", "FLUX_TASK_RANK", "JSM_NAMESPACE_RANK",
)  # fmt: skip
# of a process on its node; mpirun before Slurm, which knows only the daemons of mpirun
LOCAL_RANKS = (
    *(row.local_rank for row in LAUNCHERS if row.name != "srun"), "SLURM_LOCALID",
    "FLUX_TASK_LOCAL_ID", "JSM_NAMESPACE_LOCAL_RANK",
)  # fmt: skip


def _mpi(reader: _Reader) -> None:
    reader.number("rank", *_MPI_RANKS)
    sizes = (row.world_size for row in _MPIRUN)
    reader.number("world_size", *sizes, "FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE")
    local = (row.local_rank for row in _MPIRUN)
    reader.number("local_rank", *local, "FLUX_TASK_LOCAL_ID", "JSM_NAMESPACE_LOCAL_RANK")
    reader.number("num_nodes", "FLUX_JOB_NNODES")
    reader.number("nproc_per_node", *(row.local_world_size for row in _MPIRUN))


def _horovod(reader: _Reader) -> None:
    reader.number("rank", _HOROVOD.rank)
    reader.number("world_size", _HOROVOD.world_size)
    reader.number("local_rank", _HOROVOD.local_rank)
    reader.number("node_rank", _HOROVOD.node_rank)
    reader.number("num_nodes", "HOROVOD_CROSS_SIZE")
    reader.number("nproc_per_node", _HOROVOD.local_world_size)


def _platform(reader: _Reader) -> None:
    """Read what SageMaker, Azure ML and SkyPilot say of a job's nodes."""
    environ, numbers = reader.environ, reader.numbers
    nodes, node = num_nodes_of_job(environ), node_of_job(environ)
    if nodes is None:
        return
    by = next((row.num_nodes for row in PLATFORMS if row.num_nodes in environ), "SM_HOSTS")
    reader.given_number("num_nodes", by, str(nodes))
    if node is not None:
        said = (row.node_rank for row in PLATFORMS if row.node_rank in environ)
        reader.given_number("node_rank", next(said, "SM_CURRENT_HOST"), str(node))
    each = ranks_of_node(environ, numbers.get("world_size", 0))
    if each:
        reader.given_number("nproc_per_node", by, str(each))


def _derive(numbers: dict[str, int]) -> None:
    """Fill in what follows from the rest, where ranks are numbered node by node."""
    nproc, rank, world = (numbers.get(name) for name in ("nproc_per_node", "rank", "world_size"))
    if "node_rank" not in numbers and rank is not None and rank >= 0:
        if nproc and rank % nproc == numbers.get("local_rank", rank % nproc):
            numbers["node_rank"] = rank // nproc
        elif rank == 0:
            numbers["node_rank"] = 0  # rank 0 runs on the first node, however many it has
    if "num_nodes" not in numbers and nproc and world and world % nproc == 0:
        numbers["num_nodes"] = world // nproc


def is_of_mpirun(environ: Mapping[str, str]) -> bool:
    """Return whether mpirun started this. In a job of Slurm it does so with srun, one task a node.

    What Slurm says of tasks, step and numbers is then true of mpirun's daemons alone, and the node
    on which mpirun itself runs has none of them.
    """
    return "OMPI_COMM_WORLD_RANK" in environ or "MPI_LOCALRANKID" in environ


def is_of_srun(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this on all nodes of a step.

    A batch script and the shell of salloc run on one node. The script has the numbers of a task
    too, and no step; the shell (use_interactive_step of slurm.conf) has a step of its own.
    """
    if environ.get("SLURM_STEP_ID") == _INTERACTIVE_STEP:
        return False
    is_step = "SLURM_STEP_NUM_TASKS" in environ or "SLURM_STEP_ID" in environ
    return is_step or environ.get("SLURM_PROCID", "0") != "0"


def first_node(text: str) -> str:
    """Return the first host of a Slurm node list: "a[03-05,9],b" begins with a03."""
    hit = re.match(r"([^\[,]*)(?:\[([^\]]*)\]([^\[,]*))?", text)
    if hit is None or hit[2] is None:
        return hit[1] if hit is not None else ""
    return hit[1] + re.split(r"[,-]", hit[2])[0] + hit[3]


def _split_endpoint(text: str) -> tuple[str, str]:
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        return host, port.removeprefix(":")
    if text.count(":") > 1:
        return text, ""  # an IPv6 address alone
    host, _, port = text.partition(":")
    return host, port


def _compared(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that must agree. Values of secrets stay on this node."""
    return {
        name: HIDDEN if holds_secret(name) else cut(redact(value), _MAX_VALUE)
        for name, value in sorted(environ.items())
        if name.startswith(COMPARED)
    }
