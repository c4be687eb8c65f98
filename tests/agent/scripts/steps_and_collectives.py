"""Steps with some collectives each, until enough time went by for every window of the governor.

With a second argument the kernels take PyTorch's part of a call for so many us: where nearly all
of the cost is PyTorch's, the governor rightly sees no gain in thinning steps.
"""

import sys
import time

import torch
import torch.distributed as dist

from rankscope.rank.hooks.collectives.kernels import Kernels

if len(sys.argv) > 2:
    Kernels.outside_us = float(sys.argv[2])
dist.init_process_group("gloo")
model = torch.nn.Linear(10, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.ones(1000)
began = time.monotonic()
is_over = torch.zeros(1)
while not is_over.item():
    optimizer.zero_grad()
    model(torch.ones(4, 10)).sum().backward()
    for _ in range(5):
        dist.all_reduce(x)
    is_over.fill_(time.monotonic() - began > float(sys.argv[1]))
    dist.broadcast(is_over, 0)
    optimizer.step()
    time.sleep(0.01)
dist.destroy_process_group()
