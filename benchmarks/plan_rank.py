"""One rank of `benchmarks/plan.py`: what the trainer, or a link, takes here.

torchrun ... plan_rank.py FOLDER JSON, where JSON is a list of [memory|time|link, arguments of the
trainer]; one line of JSON for each is written to FOLDER/rank-N.jsonl as soon as it is known
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from rankscope_trainer.command_line import load_settings
from rankscope_trainer.train import Trainer
from rankscope_trainer.world import World, join_world

TINY = "--layers 8 --width 16 --heads 4 --context 16 --batch-size 1 --steps 2".split()
SKIPPED, MEASURED = 3, 4  # steps: connections and buckets are made in the first ones
SIZES = (1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
REPEATS = 7
MESSAGES, ASLEEP = 200, 0.025  # pairs of sums of layers that are cut; the sleep before each, s
WIDTH, POSITIONS = 96, 16  # of these layers


def memory(world: World, arguments: list[str]) -> dict[str, Any]:
    """Return how far the memory of this process rose above that of a tiny run of the same kind."""
    _train(world, [*arguments, *TINY])
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    _train(world, [*arguments, "--steps", "3"])
    return {"bytes": _status("VmHWM") - before}


def timing(world: World, arguments: list[str]) -> dict[str, Any]:
    """Return the median of the steps, from the beginning of one to that of the next.

    Where steps differ by design, as those that average, their mean.
    """
    path = Path(sys.argv[1]) / f"times-{world.rank}.jsonl"
    path.unlink(missing_ok=True)
    _train(world, [*arguments, "--steps", str(SKIPPED + MEASURED + 1), "--step-times", str(path)])
    began = [json.loads(line)["began_ns"] for line in path.read_text().splitlines()]
    steps = [(end - start) / 1e9 for start, end in itertools.pairwise(began[SKIPPED:])]
    usual = statistics.mean if "local_sgd" in arguments else statistics.median
    return {"seconds": usual(steps)}


def link(world: World, _arguments: list[str]) -> dict[str, Any]:
    """Return the median seconds of an all_reduce, and of half a round trip, by size."""
    found: dict[str, Any] = {"all_reduce": {}, "send": {}}
    for size in SIZES:
        tensor = torch.zeros(size // 4)
        found["all_reduce"][size] = _median(lambda tensor=tensor: dist.all_reduce(tensor))
        found["send"][size] = _median(lambda tensor=tensor: _ping(tensor, world)) / 2
    return found


def message(world: World, _arguments: list[str]) -> dict[str, Any]:
    """Return the median seconds of two matrices that are cut over all ranks, both ways.

    That are two sums, one in each way. As in a step each rank slept before.
    """
    mesh = init_device_mesh("cpu", (world.world_size,))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    cut = parallelize_module(layers, mesh, plan, src_data_rank=None)
    inputs = torch.zeros(POSITIONS, WIDTH, requires_grad=True)
    took = []
    for _ in range(MESSAGES):
        time.sleep(ASLEEP)
        began = time.perf_counter()
        outputs = cut(inputs)
        forward = time.perf_counter() - began
        time.sleep(ASLEEP)
        began = time.perf_counter()
        outputs.sum().backward()
        took.append(forward + time.perf_counter() - began)
    return {"seconds": statistics.median(took)}


def _ping(tensor: torch.Tensor, world: World) -> None:
    if world.rank == 0:
        dist.send(tensor, 1)
        dist.recv(tensor, 1)
    elif world.rank == 1:
        dist.recv(tensor, 0)
        dist.send(tensor, 0)


def _median(call: Callable[[], Any]) -> float:
    took = []
    for _ in range(REPEATS):
        dist.barrier()
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def _train(world: World, arguments: list[str]) -> None:
    Trainer(load_settings(arguments, {}, world.world_size), world).run()


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def main() -> None:
    folder, jobs = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    world = join_world(device="cpu", timeout_seconds=600)
    measures = {"memory": memory, "time": timing, "link": link, "message": message}
    with (folder / f"rank-{world.rank}.jsonl").open("w", buffering=1) as file:
        for kind, arguments in jobs:
            dist.barrier()
            row = measures[kind](world, arguments) | {"load": round(os.getloadavg()[0], 1)}
            file.write(json.dumps(row) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
