"""A model cut over the ranks with plain send and recv: the batch stays in one piece.

`--parts` cuts it, but each part is through before the next one begins, which helps nothing.
"""

import argparse
import json
import time

import torch
import torch.distributed as dist
from torch import nn

WIDTH, LAYERS, BATCH = 512, 6, 512


def seconds(call, *arguments):
    began = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--step-times", default="/dev/null")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    is_first, is_last = rank == 0, rank == world - 1
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS // world)]
    stage = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
    for step in range(1, arguments.steps + 1):
        waited = 0.0
        optimizer.zero_grad()
        for size in [BATCH // arguments.parts] * arguments.parts:
            x = torch.randn(size, WIDTH)
            if not is_first:
                waited += seconds(dist.recv, x, rank - 1)
                x.requires_grad_()
            y = stage(x)
            if is_last:
                y.square().mean().backward()
            else:
                waited += seconds(dist.send, y.detach(), rank + 1)
                gradient = torch.empty_like(y)
                waited += seconds(dist.recv, gradient, rank + 1)
                y.backward(gradient)
            if not is_first:
                waited += seconds(dist.send, x.grad, rank - 1)
        optimizer.step()
        with open(arguments.step_times, "a") as file:
            row = {"rank": rank, "step": step, "ended_ns": time.time_ns(), "waited_seconds": waited}
            file.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


main()
