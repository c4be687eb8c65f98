"""The launch: what the environment says of ranks, nodes and the endpoint."""

from __future__ import annotations

from typing import Literal

import msgspec

Launcher = Literal["torchrun", "slurm", "mpi", "kubernetes", "env", "hand"]
Mode = Literal["static", "c10d", "env"]  # how the job will meet: it decides what a fault does


class LaunchFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What this node was told. None and empty: not told."""

    launcher: Launcher = "hand"
    mode: Mode = "static"
    master_addr: str = ""
    master_port: int = 29500
    node_rank: int | None = None
    num_nodes: int | None = None
    nproc_per_node: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    rendezvous_id: str = ""
    rendezvous_backend: str = ""
    read_from: tuple[str, ...] = ()  # names of the variables or options that said so
    errors: tuple[str, ...] = ()  # "WORLD_SIZE=x is no integer"
    environment: dict[str, str] = {}  # NCCL_*, GLOO_*, OMP_* ...: what `env.drift` compares
    conf_files: dict[str, str] = {}  # path: text of /etc/nccl.conf, ~/.nccl.conf
