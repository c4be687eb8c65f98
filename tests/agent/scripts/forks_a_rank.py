"""A rank whose world has ended forks another one, which leaves by `os._exit` as forks do."""

import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

CALLS = 4


def train(port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(CALLS):
        dist.all_reduce(torch.ones(4))
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


if __name__ == "__main__":
    train(free_port())
    child = mp.get_context("fork").Process(target=train, args=(free_port(),))
    child.start()
    child.join(60)
    sys.exit(child.exitcode)
