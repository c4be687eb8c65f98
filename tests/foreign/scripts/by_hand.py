"""Gradients that the script averages itself, one collective a parameter."""

import torch
import torch.distributed as dist
from torch import nn


def average_gradients(model):
    size = float(dist.get_world_size())
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad.data, op=dist.ReduceOp.SUM)
        parameter.grad.data /= size


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    model = nn.Sequential(
        nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(10, 20, 5), nn.MaxPool2d(2),
        nn.ReLU(), nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    epoch = 0
    while True:
        epoch_loss = 0.0
        for _ in range(200):
            data, target = torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(data), target)
            epoch_loss += loss.item()
            loss.backward()
            average_gradients(model)
            optimizer.step()
        print("Rank", dist.get_rank(), "epoch", epoch, ":", epoch_loss / 200, flush=True)
        epoch += 1


main()
