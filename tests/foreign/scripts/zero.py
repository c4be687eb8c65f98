"""Optimizer states that are spread over the ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DDP(nn.Sequential(*[nn.Linear(400, 400) for _ in range(8)]))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
while True:
    loss = nn.functional.mse_loss(model(torch.randn(96, 400)), torch.randn(96, 400))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
