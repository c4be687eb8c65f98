"""Hogwild: all ranks of a host train one copy of the weights in shared memory, without locks.

    rank 0   read  forward  backward  write                       read ...
    rank 1       read  forward  backward   write   read  forward ...
    rank 2   read   forward    backward   write     read ...
                 └────── the same memory ─────┘

Nothing is sent and no rank waits. A forward reads weights while others write them, and a backward
may find newer ones than its forward did; a write adds to what is there at that moment. Two writes
to one number at the same time can lose one of them. Niu, Recht, Re and Wright (2011) show that
SGD bears it where updates are few or small against the number of weights. Their method is plain
SGD: `--optimizer sgd`, with a learning rate of about 0.1. AdamW works as well; each rank then
keeps moments of its own gradients only.

Which updates meet is decided by the scheduler, so two runs differ, and the loss is not that of
single-process training; with one rank both hold. Each rank counts its updates in a place of its
own, so no count is ever lost, and sees from all counts how stale its gradient is:

    staleness = updates of all ranks that landed between its read and its write

A checkpoint is exact: all ranks wait until each has done its step, and none writes meanwhile.
What follows a checkpoint repeats bit for bit only with one rank. A validation does not wait.
"""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankscope_trainer.data import Sample
from rankscope_trainer.errors import SettingError
from rankscope_trainer.json_lines import JsonLines
from rankscope_trainer.strategies.strategy import (
    Strategy,
    accumulate_gradient,
    build_model,
    build_optimizer,
)

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings
    from rankscope_trainer.world import World

INT64_BYTES = 8
NAME_BYTES = 256
MEMORY = "/dev/shm"  # files there never reach a disk


class Hogwild(Strategy):
    """This rank's hold on the shared weights, and its count of updates."""

    is_replicated = False  # the weights are those of all ranks, but an optimizer's state is not
    reports_loss = True

    def __init__(self, settings: Settings, world: World) -> None:
        """Map the same memory on all ranks and move the weights there."""
        if world.device.type != "cpu":
            raise SettingError(
                "device", "hogwild shares the main memory, not that of a GPU", "Choose cpu"
            )
        self.microbatches = settings.microbatches_for(world.world_size)
        self._rank = world.rank
        self.shard, self.num_shards = world.rank, world.world_size
        self.writes_losses = world.rank == 0
        self.model = build_model(settings)
        num_bytes = memory_bytes(self.model, world.world_size)
        self._counts = move_into(self.model, share_memory(num_bytes), world.world_size)
        dist.barrier()  # no rank trains while another still writes its first weights
        self.optimizer = build_optimizer(settings, self.model)
        self._versions = JsonLines(settings.versions)
        self._step = 0
        self._read_version = 0
        self._metrics: dict[str, float] = {}

    def train_batch(self, batch: Sample) -> Tensor:
        """Compute a gradient from weights that may change meanwhile."""
        self._read_version = self._version()
        return accumulate_gradient(self.model, batch, self.microbatches)

    def update(self) -> None:
        """Write into the shared weights, and count it."""
        super().update()
        staleness = self._version() - self._read_version
        self._counts[self._rank] += 1  # no other rank writes there
        self._step += 1
        self._metrics = {"read_version": float(self._read_version), "staleness": float(staleness)}
        self._versions.write(
            rank=self._rank,
            step=self._step,
            read_version=self._read_version,
            staleness=staleness,
        )

    def settle(self) -> None:
        """Wait until every rank has written all its updates."""
        dist.barrier()

    def metrics(self) -> dict[str, float]:
        """Return how old the weights were."""
        return self._metrics

    def state(self) -> dict[str, Any]:
        """Return the updates that landed, of each rank."""
        return {"updates": self._counts.tolist()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on counting, once no rank is still copying the checkpoint into the weights."""
        self._step = state["updates"][self._rank]
        self._counts[self._rank] = self._step
        dist.barrier()

    def _version(self) -> int:
        """Count the updates of all ranks so far."""
        return int(self._counts.sum())


def share_memory(num_bytes: int) -> Tensor:
    """Return memory that all ranks see: a file which each of them maps.

    Rank 0 makes the file and sends its name; as soon as all have mapped it, the name is removed.
    The memory is freed with the last process, however that ends.
    """
    name = torch.zeros(NAME_BYTES, dtype=torch.uint8)
    if dist.get_rank() == 0:
        path = _make_file(num_bytes)
        name[: len(path)] = torch.frombuffer(bytearray(path, "utf-8"), dtype=torch.uint8)
    dist.broadcast(name, src=0)
    path = bytes(name.tolist()).rstrip(b"\0").decode()
    if not os.path.exists(path):
        raise SettingError(
            "strategy", f"this rank does not see {path} of rank 0", "Start all ranks on one host"
        )
    memory = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    dist.barrier()
    if dist.get_rank() == 0:
        os.unlink(path)
    return memory


def _make_file(num_bytes: int) -> str:
    folder = MEMORY if os.path.isdir(MEMORY) else None
    descriptor, path = tempfile.mkstemp(prefix="hogwild-", dir=folder)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)  # or a full disk would kill by SIGBUS later
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)
    return path


def memory_bytes(model: torch.nn.Module, world_size: int) -> int:
    """Return how much the counts of all ranks and the weights need."""
    return INT64_BYTES * world_size + sum(p.nbytes for p in model.parameters())


def move_into(model: torch.nn.Module, memory: Tensor, world_size: int) -> Tensor:
    """Make the memory hold the model's weights; return the counts, which come before them.

    All ranks have drawn the same weights, so it does not matter that each writes them.
    """
    counts = memory[: INT64_BYTES * world_size].view(torch.int64)
    start = INT64_BYTES * world_size
    for parameter in model.parameters():
        own = memory[start : start + parameter.nbytes].view(parameter.dtype)
        start += parameter.nbytes
        parameter.data = own.view_as(parameter).copy_(parameter.data)
    return counts
