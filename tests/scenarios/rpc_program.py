"""A server of weights and its workers, which call it by torch.distributed.rpc; no process group.

    python rpc_program.py spawn|late|raises
    torchrun ... rpc_program.py

Rank 0 is the server, and takes `SERVER_S` for each gradient. `late`: the agent comes after
`init_rpc`.
"""

import os
import sys
import time

import torch
import torch.multiprocessing as mp
from torch.distributed import rpc

import rankscope

RANKS, STEPS, SERVER_S = 3, 6, 0.04
WIDTH = 16


class Server:
    """Weights, and who may change them."""

    def __init__(self) -> None:
        self.weights = torch.zeros(WIDTH)

    def exchange(self, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(SERVER_S)
        self.weights -= 0.01 * gradient
        return self.weights


def train(rank: int, world_size: int, how: str) -> None:
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=world_size)
    if how == "late":
        rankscope.init()
    if rank:
        server = rpc.remote("rank0", Server)
        weights = server.to_here().weights
        for step in range(1, STEPS + 1):
            weights = weights.detach().requires_grad_()
            (weights - 1).square().sum().backward()
            if how == "raises" and rank == 2 and step == 4:
                raise RuntimeError("a worker gives up")
            weights = server.rpc_async().exchange(weights.grad).wait()
            rankscope.step(step)
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", os.environ.get("FREE_PORT", "29500"))
    if len(sys.argv) > 1:
        mp.spawn(train, args=(RANKS, sys.argv[1]), nprocs=RANKS)
    else:
        train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "")
