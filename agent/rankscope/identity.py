"""Who this process is: its rank identity, and the run that it belongs to."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from rankscope.ring import process_start_ticks
from rankscope.rundir import clean_run_id


@dataclass(frozen=True)
class RankIdentity:
    """The key (run_id, attempt, rank) with everything that goes with it; always whole."""

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


def from_environment(environ: Mapping[str, str]) -> RankIdentity | None:
    """Return the identity that a launcher wrote into the environment, None without RANK.

    torchrun sets all of it; a launcher that sets RANK and WORLD_SIZE alone is enough.
    """
    rank, world_size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    if rank is None or world_size is None:
        return None
    return build(environ, rank, world_size)


def build(environ: Mapping[str, str], rank: int, world_size: int) -> RankIdentity:
    """Return the identity of a process whose rank is known from elsewhere."""
    local_rank = _integer(environ, "LOCAL_RANK")
    local_world_size = _integer(environ, "LOCAL_WORLD_SIZE")
    return RankIdentity(
        run_id=run_id(environ),
        attempt=_integer(environ, "TORCHELASTIC_RESTART_COUNT") or 0,
        rank=rank,
        world_size=world_size,
        local_rank=rank if local_rank is None else local_rank,
        local_world_size=local_world_size or world_size,
        node_rank=_integer(environ, "GROUP_RANK") or 0,
        host=socket.gethostname(),
        pid=os.getpid(),
        role=environ.get("ROLE_NAME", ""),
    )


def run_id(environ: Mapping[str, str]) -> str:
    """Return the name of the run, the same on all ranks that can know it.

    RANKSCOPE_RUN_ID, else torchrun's --rdzv-id, else the Slurm job, else the start of the
    parent process, which the ranks of one node share.
    """
    if chosen := environ.get("RANKSCOPE_RUN_ID"):
        return clean_run_id(chosen)
    elastic = environ.get("TORCHELASTIC_RUN_ID", "")
    if elastic and elastic != "none":
        return clean_run_id(elastic)
    if job := environ.get("SLURM_JOB_ID"):
        return clean_run_id(f"slurm-{job}")
    parent = os.getppid() if "RANK" in environ else os.getpid()
    return clean_run_id(f"{socket.gethostname()}-{parent}-{process_start_ticks(parent)}")


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else None
