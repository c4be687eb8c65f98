"""A training script as its users write it: DDP, a sampler, AdamW, and `--lr` on the command line.

`--scale` says how the rate grows with the ranks: not at all, `linear`, or by their `root`.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SCALES = {"none": lambda ranks: 1, "linear": lambda ranks: ranks, "root": lambda ranks: ranks**0.5}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--scale", choices=SCALES, default="none")
    parser.add_argument("--warm-up", type=int, default=0)
    parser.add_argument("--optimizer", choices=("AdamW", "SGD"), default="AdamW")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    inputs = torch.randn(32 * arguments.batch_size * dist.get_world_size(), 32)
    data = TensorDataset(inputs, inputs[:, :8].argmax(dim=1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=arguments.batch_size, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)))
    rate = arguments.lr * SCALES[arguments.scale](dist.get_world_size())
    optimizer = getattr(torch.optim, arguments.optimizer)(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / max(1, arguments.warm_up))
    )
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


main()
