"""Steps with some collectives each, until enough time went by for every window of the governor."""

import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(10, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.ones(1000)
began = time.monotonic()
while time.monotonic() - began < float(sys.argv[1]):
    optimizer.zero_grad()
    model(torch.ones(4, 10)).sum().backward()
    for _ in range(5):
        dist.all_reduce(x)
    optimizer.step()
    time.sleep(0.01)
dist.destroy_process_group()
