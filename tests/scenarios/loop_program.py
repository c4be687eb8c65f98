"""A small DDP loop on gloo that runs until a file appears; writes each loss, bit for bit.

python loop_program.py LOSSES STOP [STEPS]: with STEPS it runs so many and does not wait between.
A file STOP.hang makes rank 1 sleep, a file STOP.profile makes it run a profiler of its own, a
file STOP.slow makes every step slow, a file STOP.late rank 1 in each step.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

LOSSES, STOP = Path(sys.argv[1]), Path(sys.argv[2])
STEPS = int(sys.argv[3]) if len(sys.argv) > 3 else 0


def be_late() -> None:
    time.sleep(0.4)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    torch.set_num_threads(1)
    model = DistributedDataParallel(torch.nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    while not STEPS or len(losses) < STEPS:
        own_profiler = STOP.with_suffix(".profile").exists() and dist.get_rank() == 1
        with torch.profiler.profile() if own_profiler else nullcontext():
            if STOP.with_suffix(".late").exists() and dist.get_rank() == 1:
                be_late()
            loss = model(torch.randn(8, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss).hex())
        if STOP.with_suffix(".hang").exists() and dist.get_rank() == 1:
            time.sleep(600)
        ends = torch.tensor(float(STOP.exists()))
        dist.all_reduce(ends)
        if not STEPS:
            if ends > 0:
                break
            time.sleep(1.0 if STOP.with_suffix(".slow").exists() else 0.05)
    LOSSES.with_suffix(f".{dist.get_rank()}").write_text("\n".join(losses))
    dist.destroy_process_group()
    # A gloo thread that lets go of a Python object while the interpreter ends aborts the process
    # (https://github.com/pytorch/pytorch/pull/179291); no agent waits for it in a bare run.
    time.sleep(0.1)


main()
