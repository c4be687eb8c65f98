"""Two ranks on gloo that work for a while, or of which one does not come: flight.py work|hang."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import time

import torch
import torch.distributed as dist


def forked_child_ends_by_itself() -> None:
    """A child runs what is registered for the exit; it must not take what is its parent's."""
    pid = os.fork()
    if pid == 0:
        atexit._run_exitfuncs()
        os._exit(7)  # gloo's own destructors wait for threads that a child does not have
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def work(rank: int) -> None:
    """Collectives whose end somebody waits for, and some that nobody ever asks about."""
    torch.manual_seed(rank)
    value = torch.randn(1000)
    half = dist.new_group([0, 1])
    for _ in range(20):
        dist.all_reduce(value)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=half)
        value = value / 3 + rank * 1e-3
    kept = [
        dist.reduce_scatter_tensor(torch.empty(500), value.clone(), async_op=True) for _ in range(4)
    ]
    forked_child_ends_by_itself()
    time.sleep(float(sys.argv[2]))
    sys.stdout.write(f"rank {rank} {value.double().sum().item().hex()} {len(kept)}\n")


def hang(rank: int) -> None:
    """Rank 1 never comes to the third collective: it holds the interpreter lock in C."""
    for number in range(3):
        while rank == 1 and number == 2:  # a signal ends a sleep
            ctypes.PyDLL(None).sleep(600)
        dist.all_reduce(torch.ones(8))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    {"work": work, "hang": hang}[sys.argv[1]](dist.get_rank())
    dist.destroy_process_group()
