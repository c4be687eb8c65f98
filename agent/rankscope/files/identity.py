"""Who this process is: its rank identity, and the run that it belongs to.

Each launcher gives its processes their rank in variables of its own (`process.family`). Only
some of them start nothing but ranks. Under the others (`srun`, `mpirun`, a pod per node) a process
may be the parent of the ranks, with the number of its node as its rank: there the first process
group decides, and the variables count where they agree with it.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from rankscope.files.run_directory import clean_run_id
from rankscope.process.family import (
    FAMILY,
    LAUNCHERS,
    family_name,
    is_rank,
    job_name,
    node_of_job,
    ranks_of_node,
    restarts_of_job,
)


@dataclass(frozen=True)
class RankIdentity:
    """The key (run_id, attempt, rank) with everything that belongs to it; always whole."""

    run_id: str
    attempt: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    host: str
    pid: int
    role: str = ""


MOST_ATTEMPTS = 1 << 20  # that a server takes
_SLURM_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def from_environment(environ: Mapping[str, str]) -> RankIdentity | None:
    """Return the identity of a process that can only be a rank, None for any other."""
    return likely(environ) if is_rank(environ) else None


def likely(environ: Mapping[str, str]) -> RankIdentity | None:
    """Return the identity that a launcher's variables give, None without any."""
    for launcher in LAUNCHERS:
        rank, size = _integer(environ, launcher.rank), _integer(environ, launcher.world_size)
        if rank is not None and size is not None:
            return build(environ, rank, size)
    return None


def build(environ: Mapping[str, str], rank: int, world_size: int) -> RankIdentity:
    """Return the identity of a process whose rank is known, the rest as the launcher gives it."""
    local_rank, local_world_size, node_rank = _place(environ, rank, world_size)
    return RankIdentity(
        run_id=run_id(environ),
        attempt=_attempt(environ),
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=node_rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        role=environ.get("ROLE_NAME", ""),
    )


def run_id(environ: Mapping[str, str]) -> str:
    """Return the name of the run, the same on all ranks that can know it.

    RANKSCOPE_RUN_ID, else torchrun's --rdzv-id, else the job of a platform (`family.PLATFORMS`),
    else the process that all ranks of one node come from.
    """
    if chosen := environ.get("RANKSCOPE_RUN_ID"):
        return clean_run_id(chosen)
    elastic = environ.get("TORCHELASTIC_RUN_ID", "")
    if elastic and elastic != "none":
        return clean_run_id(elastic)
    return clean_run_id(job_name(environ) or environ.get(FAMILY) or family_name(environ))


def of_process_group() -> tuple[int, int] | None:
    """Return rank and world size of the default process group, None where there is none yet."""
    module = sys.modules.get("torch.distributed")
    if module is None or not getattr(module, "is_initialized", bool)():
        return None
    return int(module.get_rank()), int(module.get_world_size())


def _attempt(environ: Mapping[str, str]) -> int:
    """Return how often ranks were started before: by torchrun, and by what restarts its job.

    A job that is begun again has a torchrun that counts from 0, up to its --max-restarts.
    """
    by_torchrun = _integer(environ, "TORCHELASTIC_RESTART_COUNT") or 0
    most = _integer(environ, "TORCHELASTIC_MAX_RESTARTS") or 0
    return min(restarts_of_job(environ) * (most + 1) + by_torchrun, MOST_ATTEMPTS)


def _place(environ: Mapping[str, str], rank: int, world_size: int) -> tuple[int, int, int]:
    """Return local rank, local world size and node rank of a rank."""
    for row in LAUNCHERS:
        agrees = (_integer(environ, row.rank), _integer(environ, row.world_size))
        if agrees != (rank, world_size):
            continue
        node = _integer(environ, row.node_rank)
        local_rank = _integer(environ, row.local_rank)
        local_size = _local_size(environ.get(row.local_world_size, ""), node or 0)
        if local_size is None:
            local_size = _integer(environ, "LOCAL_SIZE")  # of deepspeed
        if local_size is None:
            local_size = ranks_of_node(environ, world_size)
        if node is None:
            node = _integer(environ, "CROSS_RANK")
        if node is None:
            node = node_of_job(environ)
        if node is None:
            # launchers that do not say fill one node after the other
            node = rank // local_size if local_size else 0
        return rank if local_rank is None else local_rank, local_size or world_size, node
    # only the process group shows it: Lightning's own launcher sets two variables
    local_rank = _integer(environ, "LOCAL_RANK")
    node = node_of_job(environ) or 0
    return rank if local_rank is None else local_rank, world_size, node


def _local_size(text: str, node: int) -> int | None:
    """Return a number of processes per node, Slurm's lists like `4(x2),3` included."""
    sizes: list[int] = []
    for count, times in _SLURM_TASKS.findall(text):
        sizes += [int(count)] * min(int(times or 1), node + 1)
        if len(sizes) > node:
            return sizes[node]
    return sizes[0] if len(sizes) == 1 else None


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "") if name else ""
    return int(text) if text.isdecimal() else None
