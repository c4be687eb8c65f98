"""DDP on two ranks: prints each step's own and reduced gradient norms, computed by hand."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

steps, micro, bad_step, flip_step = (int(word) for word in sys.argv[1:5])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
twin = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))  # outside DDP
model = DistributedDataParallel(model, gradient_as_bucket_view=micro > 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(rank + 1)


def norm(module):
    return sum(float(one.grad.double().square().sum()) for one in module.parameters()) ** 0.5


for step in range(1, steps + 1):
    twin.load_state_dict(model.module.state_dict())
    optimizer.zero_grad()
    twin.zero_grad()
    for number in range(micro):
        x = torch.randn(3, 6, generator=generator)
        if step == bad_step and rank == 1:
            x[0, 0] = float("nan")
        model.require_backward_grad_sync = number == micro - 1
        model(x).square().mean().backward()
        twin(x).square().mean().backward()
    line = {"rank": rank, "step": step, "local": norm(twin), "reduced": norm(model)}
    os.write(1, json.dumps(line).encode() + b"\n")  # whole lines, also from two ranks at once
    if step == bad_step:
        optimizer.zero_grad()
    optimizer.step()
    if step == flip_step and rank == 1:
        with torch.no_grad():
            weight = model.module[0].weight.view(torch.int32)
            weight[0, 0] ^= 1
dist.destroy_process_group()
# A gloo thread that lets go of a Python object while the interpreter ends aborts the process
# (https://github.com/pytorch/pytorch/pull/179291); no agent waits for it in a bare run.
time.sleep(0.1)
