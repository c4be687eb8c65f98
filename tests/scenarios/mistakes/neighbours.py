"""Ranks that share a sequence and exchange with their neighbours: all of them work at once.

`ring` passes keys and values round, as ring attention does, `halo` the borders of each rank's
part, as convolutions over a cut picture do. Even ranks send first and odd ones receive first.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

WIDTH, LAYERS, ROWS = 256, 4, 512


class Exchange(torch.autograd.Function):
    """Sends to one rank and receives from another; the gradient goes the other way."""

    @staticmethod
    def forward(context, x, target, source):
        context.ranks = source, target
        return swap(x, target, source)

    @staticmethod
    def backward(context, gradient):
        return swap(gradient.contiguous(), *context.ranks), None, None


def swap(x, target, source):
    received = torch.empty_like(x)
    if dist.get_rank() % 2:
        dist.recv(received, source)
        dist.send(x.detach(), target)
    else:
        dist.send(x.detach(), target)
        dist.recv(received, source)
    return received


def ring(x, layer, rank, world):
    query, held = layer(x), x
    total = torch.zeros_like(query)
    for turn in range(world):
        weights = torch.softmax(query @ held.T / WIDTH**0.5, dim=-1)
        total = total + weights @ held
        if turn < world - 1:
            held = Exchange.apply(held, (rank + 1) % world, (rank - 1) % world)
    return total


def halo(x, layer, rank, world):
    # even ranks first with the neighbour above, odd ones first with the one below
    for shift in (1, -1) if rank % 2 == 0 else (-1, 1):
        if 0 <= rank + shift < world:
            border = x[-8:] if shift > 0 else x[:8]
            other = Exchange.apply(border.contiguous(), rank + shift, rank + shift)
            x = x + other.mean(0)
    return layer(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("pattern", choices=("ring", "halo"))
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    mix = ring if arguments.pattern == "ring" else halo
    model = nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        for _ in range(LAYERS)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(arguments.steps):
        x = torch.randn(ROWS, WIDTH)
        for layer in model:
            x = mix(x, layer, rank, world)
        optimizer.zero_grad()
        x.square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    dist.destroy_process_group()


main()
