"""Epochs with a validation between them, a schedule, and the best model kept."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def sequences(count, seed):
    generator = torch.Generator().manual_seed(seed)
    signal = torch.cumsum(torch.randn(count, 24, 8, generator=generator), dim=1)
    return TensorDataset(signal[:, :-1], signal[:, -1])


class Forecaster(nn.Module):
    """Two recurrent layers and a norm with running statistics."""

    def __init__(self, hidden=96):
        super().__init__()
        self.rnn = nn.GRU(8, hidden, num_layers=2, batch_first=True)
        self.norm = nn.BatchNorm1d(hidden)
        self.out = nn.Linear(hidden, 8)

    def forward(self, x):
        states, _ = self.rnn(x)
        return self.out(self.norm(states[:, -1]))


def train_epoch(model, loader, optimizer):
    model.train()
    sum_loss, batches = 0.0, 0
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.smooth_l1_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        sum_loss += loss.item()
        batches += 1
    return sum_loss / batches


@torch.no_grad()
def validate(model, loader):
    model.eval()
    total = torch.zeros(2)
    for x, y in loader:
        total += torch.tensor([nn.functional.smooth_l1_loss(model(x), y).item() * len(x), len(x)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10**9)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train_set, val_set = sequences(2048, 1), sequences(512, 2)
    sampler = DistributedSampler(train_set)
    train = DataLoader(train_set, batch_size=32, sampler=sampler)
    val = DataLoader(val_set, batch_size=64, sampler=DistributedSampler(val_set, shuffle=False))
    model = DDP(Forecaster())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=5)
    best = float("inf")
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_loss = train_epoch(model, train, optimizer)
        val_loss = validate(model, val)
        schedule.step(val_loss)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: train_loss {train_loss:.4f} val_loss {val_loss:.4f}", flush=True)
            if val_loss < best:
                best = val_loss
                torch.save(model.module.state_dict(), os.path.join(os.getcwd(), "best.pt"))


if __name__ == "__main__":
    main()
