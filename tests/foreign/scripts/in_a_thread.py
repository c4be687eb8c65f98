"""A loop that runs in a thread, as servers and some schedulers do it."""

import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    model = DDP(nn.Sequential(nn.Linear(300, 900), nn.Tanh(), nn.Linear(900, 300)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while True:
        optimizer.zero_grad()
        x = torch.randn(160, 300)
        (model(x) - x).square().mean().backward()
        optimizer.step()


dist.init_process_group("gloo")
torch.set_num_threads(1)
worker = threading.Thread(target=train, name="train")
worker.start()
worker.join()
