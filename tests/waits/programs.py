"""Training programs whose ranks wait for each other in every way that PyTorch has.

    torchrun ... programs.py FOLDER STEPS SLOW_MS NAME ...

The last rank sleeps for `SLOW_MS` in each forward, so that the others wait. FOLDER gets a file a
rank: the name of each program, and from when to when it trained, in ns of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 256
SLOW_S = 0.0


class Slow(nn.Module):
    """Layers of one width, and a sleep on the last rank."""

    def __init__(self, layers: int = 4, *, norm: bool = False, spare: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.spare = nn.Linear(WIDTH, WIDTH) if spare else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(SLOW_S)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        y: torch.Tensor = self.norm(x)
        return y


def batch(rows: int = 64) -> torch.Tensor:
    return torch.randn(rows, WIDTH)


def train(model: nn.Module, steps: int, between: Callable[[int], Any] = lambda step: None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()
        between(step)


def ddp(model: nn.Module, **more: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, **more)


def one_bucket(steps: int) -> None:
    train(ddp(Slow()), steps)


def two_buckets(steps: int) -> None:
    train(ddp(Slow(), bucket_cap_mb=0.6), steps)


def four_buckets(steps: int) -> None:
    train(ddp(Slow(), bucket_cap_mb=0.26), steps)


def sixteen_buckets(steps: int) -> None:
    train(ddp(Slow(16), bucket_cap_mb=0.26), steps)


def buffers(steps: int) -> None:
    train(ddp(Slow(norm=True)), steps)


def buffers_in_many_buckets(steps: int) -> None:
    train(ddp(Slow(norm=True), bucket_cap_mb=0.26), steps)


def bucket_view(steps: int) -> None:
    train(ddp(Slow(), gradient_as_bucket_view=True), steps)


def static_graph(steps: int) -> None:
    train(ddp(Slow(), static_graph=True), steps)


def unused_parameters(steps: int) -> None:
    train(ddp(Slow(spare=True), find_unused_parameters=True), steps)


def fp16_hook(steps: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = ddp(Slow())
    model.register_comm_hook(None, fp16_compress_hook)
    train(model, steps)


def power_sgd(steps: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook

    model = ddp(Slow())
    model.register_comm_hook(hook.PowerSGDState(None, start_powerSGD_iter=2), hook.powerSGD_hook)
    train(model, steps)


def accumulation(steps: int) -> None:
    model = ddp(Slow(norm=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        for micro in range(3):
            with model.no_sync() if micro < 2 else contextlib.nullcontext():
                model(batch()).square().mean().backward()
        optimizer.step()


def by_hand(steps: int) -> None:
    model = Slow()

    def average(_: int) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.data, async_op=True).wait()

    train(model, steps, average)


def functional(steps: int) -> None:
    from torch.distributed._functional_collectives import all_reduce

    model = Slow()

    def average(_: int) -> None:
        for parameter in model.parameters():
            parameter.data.copy_(all_reduce(parameter.data, "avg", dist.group.WORLD) + 0)

    train(model, steps, average)


def objects(steps: int) -> None:
    def tell(step: int) -> None:
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, {"step": step})
        dist.broadcast_object_list(told)
        dist.barrier()

    train(ddp(Slow()), steps, tell)


def monitored(steps: int) -> None:
    train(Slow(), steps, lambda step: dist.monitored_barrier())


def fsdp(steps: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({nn.Linear})
    train(FullyShardedDataParallel(Slow(), auto_wrap_policy=policy, device_id=torch.device("cpu")),
          steps)  # fmt: skip


def fsdp2(steps: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = Slow(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    train(fully_shard(model, mesh=mesh), steps)


def tensor_parallel(steps: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    model = Slow(2)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
    train(parallelize_module(model, mesh, plan), steps)


def zero(steps: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = ddp(Slow())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()


PROGRAMS = {
    one.__name__: one
    for one in (
        one_bucket, two_buckets, four_buckets, sixteen_buckets, buffers, buffers_in_many_buckets,
        bucket_view, static_graph, unused_parameters, fp16_hook, power_sgd, accumulation,
        by_hand, functional, objects, monitored, fsdp, fsdp2, tensor_parallel,
        zero,
    )
}  # fmt: skip


def main(folder: str, steps: str, slow_ms: str, *names: str) -> None:
    """Run the programs one after the other."""
    global SLOW_S
    SLOW_S = float(slow_ms) / 1e3
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with open(f"{folder}/programs-{os.getpid()}.txt", "w") as told:
        for name in names:
            torch.manual_seed(0)
            dist.barrier()
            began = time.monotonic_ns()
            PROGRAMS[name](int(steps))
            told.write(f"{name} {began} {time.monotonic_ns()}\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
