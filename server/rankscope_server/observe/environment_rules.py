"""How bad it is when ranks differ on a fact of their environment, and when two values are equal.

First match wins. Levels of single variables follow NCCL's and PyTorch's documentation of their
environment variables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, TypeAlias

from rankscope_server.findings.finding import Severity

Level: TypeAlias = Literal["critical", "warning", "info", "own"]  # own: of one rank by nature
Kind: TypeAlias = Literal["version", "environment", "hardware", "job"]

_UNKNOWN = frozenset({"", "unknown", "n/a", "none"})  # how facts say that they could not be read
# Different by nature: one per process, device or machine.
_OWN = re.compile(
    r"(^|[._])(pid|uuid|serial|pci|bus_id|address|addr|affinity|device_index|topology|cwd|argv|script)"
    r"([._]|$)|(^|[._])((local_|group_|role_|node_|global_)?rank)$"
    r"|^env\.((LOCAL_|GROUP_|ROLE_|NODE_|GLOBAL_)?RANK|.*_RANK|MASTER_\w+|CUDA_VISIBLE_DEVICES"
    r"|NVIDIA_VISIBLE_DEVICES|HIP_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES|\w*_VISIBLE_DEVICES"
    r"|SLURM_(PROCID|LOCALID|NODEID|GTIDS|TASK_PID|JOB_GPUS|STEP_GPUS|TOPOLOGY_\w+"
    r"|STEP_LAUNCHER_PORT|SRUN_COMM_PORT|LAUNCH_NODE_IPADDR|CPU_BIND\w*|CPUS_ON_NODE"
    r"|JOB_CPUS_PER_NODE|NODENAME)"
    r"|POD_NAME|NODE_NAME|JOB_COMPLETION_INDEX|VC_TASK_INDEX"
    r"|SLURMD_NODENAME|NCCL_HOSTID|NCCL_TOPO_\w+|NCCL_GRAPH_\w+|TORCHELASTIC_(ERROR_FILE|\w*PID)|HOSTNAME)$"
    r"|(^|\.)master_(addr|port)$|cuda_visible_devices$",
    re.IGNORECASE,
)
# Names of a machine: each host has its own, so one that two hosts share is what is odd.
_OF_HOST = re.compile(
    r"(^|[._])(hostname|host|fqdn|node_?name|(machine|boot|host|instance)[._]?id|ip|mac)$",
    re.IGNORECASE,
)
_WRITTEN: tuple[tuple[Level, Kind, str], ...] = (
    # a version of either decides what is sent
    ("critical", "version", r"^(nccl|rccl|torch)([._]version)?$|^torch\.git$"),
    ("critical", "job", r"^(env\.)?world_size$|(^|[._])rank_map$"),
    ("critical", "job", r"(config|model|plan)[._](hash|fingerprint)$"),
    ("critical", "job", r"(code|git)[._](commit|hash|sha)$|^commit$"),
    # seeds that differ are a policy more often than a mistake; likewise how a rank was started
    # (the first one saves, logs) and how long its part of the data is
    ("info", "job", r"^(torch\.seed|code\.dirty|dataset\.(type|length)|command\.hash)$"),
    ("critical", "job", r"dataset[._](fingerprint|hash)$|(^|[._])seed([._]policy)?$"),
    ("critical", "job", r"(^|[._])(dtype|amp|autocast|tf32|deterministic\w*)([._]\w+)?$"),
    ("critical", "hardware", r"compute_capability$|gpu\.capability$"),
    ("critical", "environment", r"^env\.NCCL_(PROTO|ALGO|COMM_ID|NVLS\w*)$"),
    ("critical", "environment", r"^env\.TORCH_NCCL_\w+$"),
    # DETAIL adds a group of its own to every process group: mixed, ranks wait for each other
    ("critical", "environment", r"^env\.TORCH_DISTRIBUTED_DEBUG$"),
    ("info", "environment",
     r"^env\.(NCCL_DEBUG\w*|TORCH_(LOGS|CPP_LOG_LEVEL|HOME|SHOW_CPP\w*)|TORCHELASTIC_\w+"
     r"|CUDA_MODULE_LOADING)$"),
    ("warning", "environment", r"^env\.(NCCL_\w+|GLOO_\w+|UCX_\w+|FI_\w+)$"),
    ("warning", "environment",
     r"^env\.((OMP|MKL|OPENBLAS|KMP)_\w+|CUDA_\w+|CUBLAS_\w+|PYTORCH_\w+|PYTHONHASHSEED"
     r"|LD_PRELOAD|LD_LIBRARY_PATH|LOCAL_WORLD_SIZE|SLURM_(NTASKS\w*|NNODES))$"),
    ("info", "environment", r"^env\."),
    ("info", "environment", r"(^|[._])(hostname|host|fqdn|path|locale|executable|cwd)$"),
    ("warning", "version", r"^(driver|cudnn|cublas|kernel|os|libc|ofed|firmware)([._]\w+)*$"),
    ("warning", "hardware", r"^(gpu|host|mtu|power|clock|ecc|governor|ulimit|hugepages|nic)"),
    ("warning", "hardware", r"^(machine|torch\.threads)$"),
    ("warning", "version", r"."),  # a library that is loaded, for example transformers
)  # fmt: skip
_RULES = tuple((level, kind, re.compile(text, re.IGNORECASE)) for level, kind, text in _WRITTEN)
_CUDA = re.compile(r"^(torch\.)?cuda([._]version)?$", re.IGNORECASE)
_PYTHON = re.compile(r"^python([._]version)?$", re.IGNORECASE)
_BYTES_OR_CLOCK = re.compile(r"(_bytes|_mhz|_watts)$")
_NEAR = 0.02  # firmware keeps a little memory: machines alike differ by less
# A variable that is not set says something; a library that is not loaded says nothing.
_YES_NO = {"1": "1", "true": "1", "yes": "1", "on": "1", "0": "0", "false": "0", "no": "0",
           "off": "0"}  # fmt: skip


def level_of(fact: str, values: tuple[str, ...] = ()) -> Level:
    """Return how bad it is that ranks differ on a fact, by its values."""
    if _OWN.search(fact):
        return "own"
    if _CUDA.search(fact):
        return "critical" if len(values) < 2 or _differ_in(values, 1) else "warning"
    if _PYTHON.search(fact):
        return "warning" if len(values) < 2 or _differ_in(values, 2) else "info"
    return next(level for level, _, pattern in _RULES if pattern.search(fact))


def severity_of(fact: str, values: Iterable[str]) -> Severity:
    """Return the level for a page that shows every difference: what is of one rank is info.

    So is what is equal on all ranks that have it: rank 0 imports what it saves and logs with.
    """
    known = {normal(fact, value) for value in values if value or is_variable(fact)}
    level = level_of(fact, tuple(sorted(known)))
    return "info" if level == "own" or len(known) < 2 else level


def kind_of(fact: str) -> Kind:
    """Return what sort of fact it is."""
    if _CUDA.search(fact) or _PYTHON.search(fact):
        return "version"
    return next(kind for _, kind, pattern in _RULES if pattern.search(fact))


def is_unknown(fact: str, value: str) -> bool:
    """Return whether a value says that the fact could not be read; a variable may be empty."""
    return not is_variable(fact) and value.lower() in _UNKNOWN


def is_of_host(fact: str) -> bool:
    """Return whether a fact names the machine: two hosts differ on it by nature."""
    return bool(_OF_HOST.search(fact))


def is_variable(fact: str) -> bool:
    """Return whether a fact is an environment variable: unset, it says something."""
    return fact.startswith("env.")


def normal(fact: str, value: str) -> str:
    """Return a value in the one way in which equal values are written."""
    text = re.sub(r"\s*([,;:=])\s*", r"\1", " ".join(value.split())).rstrip("/,;") or value
    if is_variable(fact):
        return _YES_NO.get(text.lower(), text)
    return text.removeprefix("v") if kind_of(fact) == "version" else text


def is_near(fact: str, one: str, other: str) -> bool:
    """Return whether two amounts differ by no more than machines alike do."""
    if not _BYTES_OR_CLOCK.search(fact):
        return False
    try:
        first, second = float(one), float(other)
    except ValueError:
        return False
    return abs(first - second) <= _NEAR * max(abs(first), abs(second))


def _differ_in(values: tuple[str, ...], places: int) -> bool:
    """Return whether versions differ within their first numbers."""
    return len({tuple(re.findall(r"\d+", value)[:places]) for value in values}) > 1
