"""Trains a few steps on two ranks, whoever started it; the starters of test_launchers.py run it.

    python starts.py [spawn|fork|forkserver|again|dies]

The rank is read from whatever the launcher set, as programs of such sites do.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

STEPS = 6
NAMES = (
    ("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"), ("PMI_RANK", "PMI_SIZE"),
)  # fmt: skip


def train(rank: int, world_size: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
    print(f"trained as {rank}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", os.environ.get("FREE_PORT", "29500"))
    how = sys.argv[1] if len(sys.argv) > 1 else ""
    if how == "again" and "AGAIN" not in os.environ:
        os.environ["AGAIN"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    if how == "dies":
        raise RuntimeError("told to die before there is a group")
    if how in ("spawn", "fork", "forkserver"):
        mp.start_processes(train, args=(2,), nprocs=2, start_method=how)
    else:
        rank, size = next((r, s) for r, s in NAMES if r in os.environ)
        train(int(os.environ[rank]), int(os.environ[size]))
