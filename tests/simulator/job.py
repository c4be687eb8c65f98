"""What is simulated: ranks in three dimensions, their work, their noise, and what is wrong.

Times are ms of true time unless a name says otherwise. A job is the manifest of its run: the
truth that findings are compared with. `manifest` and `job_of` write and read it as JSON.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

FaultKind = Literal[
    "slow_compute", "slow_data", "slow_link", "hang", "skip", "insert", "swap", "shape", "dtype",
    "operation", "reduce_op", "clock_set", "contention", "garbage", "thermal", "page_cache",
    "slow_loader", "slow_save", "leak", "nan", "replica_drift", "drift", "crash",
]  # fmt: skip
# What a rank is slowed by looks alike in its step times; a second signal tells the kinds apart.
SLOW_COMPUTE = frozenset({"slow_compute", "contention", "garbage", "thermal"})
SLOW_DATA = frozenset({"slow_data", "page_cache"})
STOPS = frozenset({"hang", "crash"})
Point = Literal["data", "forward", "backward", "gradients", "norm"]
ALWAYS = 1 << 30


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong, from step `start` for `steps` steps (`steps` of the slow kinds)."""

    kind: FaultKind
    rank: int = -1
    start: int = 1
    steps: int = ALWAYS
    # slow: share of the rank's own time added, or of the transfer; clock: ms; leak: MiB a step
    size: float = 0.0
    # Of a slow link one of these, or the rank whose adapter it is; a clock is set on a host.
    group: str = ""  # a prefix such as "dp-" means all that begin so
    host: int = -1
    leaf: int = -1
    point: Point = "forward"  # where a rank hangs
    microbatch: int = 0  # in which forward or backward it hangs
    bucket: int = 0  # which all_reduce of the gradients is wrong

    def covers(self, step: int) -> bool:
        """Return whether it is on."""
        return self.start <= step < self.start + self.steps


@dataclass(frozen=True)
class Noise:
    """How uneven healthy work is. Shares are 0-1."""

    sigma: float = 0.03  # of the log of each rank's time in each step
    hiccup_share: float = 0.01  # of (rank, step) that take `hiccup_ratio` as long
    hiccup_ratio: float = 2.0
    transfer_sigma: float = 0.05
    clock_offset_ms: float = 0.0  # of each host, uniform to either side
    clock_drift_ppm: float = 0.0


@dataclass(frozen=True)
class Job:
    """A training run. Ranks lie as Megatron lays them: tensor innermost, pipeline outermost."""

    data: int = 8
    tensor: int = 1
    pipeline: int = 1
    steps: int = 50
    microbatches: int = 4
    buckets: int = 4
    forward_ms: float = 20.0  # of all microbatches of a step
    data_ms: float = 1.0
    optimizer_ms: float = 3.0
    transfer_ms: float = 1.0
    issue_ms: float = 0.05  # between two calls handed in without work between them
    ranks_per_host: int = 8
    hosts_per_leaf: int = 8
    save_every: int = 0  # steps; 0: no checkpoints
    save_ms: float = 300.0
    tells_numbers: bool = False  # losses, norms, memory and checksums of all ranks
    backend: str = "nccl"
    noise: Noise = Noise()
    faults: tuple[Fault, ...] = ()
    seed: int = 0

    @property
    def num_ranks(self) -> int:
        """Return the world size."""
        return self.data * self.tensor * self.pipeline

    @property
    def num_hosts(self) -> int:
        """Return how many hosts the ranks fill."""
        return -(-self.num_ranks // self.ranks_per_host)

    @cached_property
    def grid(self) -> np.ndarray:
        """Return the ranks by (pipeline, data, tensor)."""
        return np.arange(self.num_ranks).reshape(self.pipeline, self.data, self.tensor)

    def place(self, rank: int) -> tuple[int, int, int]:
        """Return (pipeline, data, tensor) of a rank."""
        stage, rest = divmod(rank, self.data * self.tensor)
        return stage, rest // self.tensor, rest % self.tensor

    def host(self, rank: int) -> str:
        """Return the name of a rank's host."""
        return f"node-{rank // self.ranks_per_host:04d}"

    def address(self, rank: int) -> str:
        """Return where a rank's host hangs: the switch at the core, the leaf, the host."""
        host = rank // self.ranks_per_host
        return f"core.leaf-{host // self.hosts_per_leaf:02d}.{self.host(rank)}"

    def group_names(self, rank: int) -> dict[str, str]:
        """Return the group of a rank for each kind of group that has more than one member."""
        stage, data, tensor = self.place(rank)
        names = {"world": "world"}
        if self.data > 1:
            names["dp"] = f"dp-{stage}-{tensor}"
        if self.tensor > 1:
            names["tp"] = f"tp-{stage}-{data}"
        if self.pipeline > 1:
            names["pp"] = f"pp-{data}-{tensor}"
        return names

    @cached_property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """Return the members of every group."""
        found: dict[str, list[int]] = {}
        for rank in range(self.num_ranks):
            for name in self.group_names(rank).values():
                found.setdefault(name, []).append(rank)
        return {name: tuple(ranks) for name, ranks in found.items()}

    def without_faults(self) -> Job:
        """Return the same job, healthy: what a fault costs is the difference."""
        return dataclasses.replace(self, faults=())


def manifest(job: Job) -> str:
    """Return the job, its seed and its faults as JSON."""
    return json.dumps(dataclasses.asdict(job))


def job_of(text: str) -> Job:
    """Return the job that a manifest describes."""
    values: dict[str, Any] = json.loads(text)
    values["noise"] = Noise(**values["noise"])
    values["faults"] = tuple(Fault(**fault) for fault in values["faults"])
    return Job(**values)
