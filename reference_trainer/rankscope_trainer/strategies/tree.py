"""Broadcast, reduce and all_reduce by a binomial tree, to be read beside the ring.

A rank's parent is its number without the lowest bit that is set. Six ranks:

           0              reduce: each rank adds what its children send, the nearest first, and
         / | \\            sends the sum to its parent
        1  2  4           broadcast: each rank receives from its parent, and sends to its children,
           |  |           the farthest first, as most ranks wait behind it
           3  5           all_reduce: the one, then the other

In each step all ranks that have something send at once, so a reduce is over after log2 N steps,
rounded up, and an all_reduce after twice as many; a ring takes 2 (N - 1). But each of them carries
the whole gradient, not 1/N of it. With a delay a for each message and b for each byte, S bytes take

    tree   2 log2 N (a + S b)           ring   2 (N - 1) (a + S b / N)

So a tree is for small messages and many ranks, a ring for large ones; libraries choose by size, or
cut the message and send its parts through two trees at once, so that no rank is only a leaf (NCCL:
Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
2009). `python benchmarks/all_reduce.py` measures where they meet.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = 0


def tree_all_reduce(flat: Tensor) -> None:
    """Replace `flat` on every rank by the sum over all ranks, with the same bits everywhere."""
    tree_reduce(flat)
    tree_broadcast(flat)


def tree_reduce(flat: Tensor) -> None:
    """Replace `flat` on rank 0 by the sum over all ranks, on the others by a part of it."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    arrived = torch.empty_like(flat)
    for child in children(rank, num_ranks):
        dist.recv(arrived, child)
        flat.add_(arrived)
    if rank != ROOT:
        dist.send(flat, parent(rank))


def tree_broadcast(flat: Tensor) -> None:
    """Replace `flat` on every rank by that of rank 0."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if rank != ROOT:
        dist.recv(flat, parent(rank))
    for child in reversed(children(rank, num_ranks)):
        dist.send(flat, child)


def parent(rank: int) -> int:
    """Return the rank that a rank sends its sum to."""
    return rank & (rank - 1)


def children(rank: int, num_ranks: int) -> list[int]:
    """Return the ranks that send to a rank, the nearest first."""
    lowest = rank & -rank or num_ranks
    found, distance = [], 1
    while distance < lowest and rank + distance < num_ranks:
        found.append(rank + distance)
        distance *= 2
    return found
