"""One rank of `benchmarks/plan.py`: what the trainer, or a link, takes here.

torchrun ... plan_rank.py FOLDER JSON, where JSON is a list of [memory|time|link|message, arguments
of the trainer]; one line of JSON for each is written to FOLDER/rank-N.jsonl as soon as it is known
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard
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
MESSAGES, ASLEEP = 80, 0.0125  # pairs of sums of layers that are cut; the sleep before each, s
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
    """Return the median seconds of two matrices that are cut, both ways: alone and over all ranks.

    `alone` each rank has both as a whole, so that nothing is sent; `seconds` has two sums, one in
    each way; `sequence_seconds` two gathers and two scatters. They take turns, and as in a step all
    ranks sleep before.
    """
    meshes = init_device_mesh("cpu", (world.world_size, 1), mesh_dim_names=("all", "own"))
    part = POSITIONS // world.world_size
    pairs = {
        "alone": (_pair(meshes["own"], Replicate()), POSITIONS),
        "seconds": (_pair(meshes["all"], Replicate()), POSITIONS),
        "sequence_seconds": (_pair(meshes["all"], Shard(0)), part),
    }
    took: dict[str, list[float]] = {name: [] for name in pairs}
    for _ in range(MESSAGES):
        for name, (pair, positions) in pairs.items():
            dist.barrier()
            took[name].append(_both_ways(pair, torch.zeros(positions, WIDTH, requires_grad=True)))
    return {name: statistics.median(times) for name, times in took.items()}


def _pair(mesh: DeviceMesh, outside: Placement) -> nn.Module:
    """Return two matrices of which the first is cut by columns and the second by rows."""
    plan = {
        "0": ColwiseParallel(input_layouts=outside), "1": RowwiseParallel(output_layouts=outside)
    }  # fmt: skip
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    return parallelize_module(layers, mesh, plan, src_data_rank=None)


def _both_ways(pair: nn.Module, inputs: torch.Tensor) -> float:
    time.sleep(ASLEEP)
    began = time.perf_counter()
    outputs = pair(inputs)
    forward = time.perf_counter() - began
    time.sleep(ASLEEP)
    began = time.perf_counter()
    outputs.sum().backward()
    return forward + time.perf_counter() - began


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
