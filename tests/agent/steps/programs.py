"""Training programs, written as people write them. Each returns its losses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

FORWARD_SECONDS, BACKWARD_SECONDS, DATA_SECONDS, OPTIMIZER_SECONDS = 0.02, 0.03, 0.01, 0.015


class _SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        time.sleep(BACKWARD_SECONDS)
        return gradients[0]


class SlowNet(nn.Module):
    """A model whose forward and backward take known times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_SECONDS)
        y: torch.Tensor = _SlowBackward.apply(self.layer(x))
        return y


class SlowSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        time.sleep(OPTIMIZER_SECONDS)
        return super().step(closure)


class SlowData(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        time.sleep(DATA_SECONDS)
        if index >= self.size:
            raise IndexError
        return torch.full((8,), float(index)), index % 3


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for index in range(12):
            yield torch.full((8,), float(index)), index % 3


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3))


def data(size: int = 48) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(size, 8, generator=generator),
        torch.randint(0, 3, (size,), generator=generator),
    )


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y)


def plain(epochs: int = 2) -> list[float]:
    model, losses = net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(epochs):
        for x, y in DataLoader(data(), batch_size=8, shuffle=True):
            loss = loss_of(model, x, y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    return losses


def accumulating(micro: int = 4) -> list[float]:
    model, losses = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for number, (x, y) in enumerate(DataLoader(data(), batch_size=4)):
        loss = loss_of(model, x, y) / micro
        loss.backward()
        losses.append(loss.item())
        if (number + 1) % micro == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def gan() -> list[float]:
    maker, critic, losses = net(), net(1), []
    first = torch.optim.Adam(critic.parameters(), lr=1e-3)
    second = torch.optim.Adam(maker.parameters(), lr=1e-3)
    for x, y in DataLoader(data(), batch_size=8):
        first.zero_grad()
        loss = loss_of(critic, x, y)
        loss.backward()
        first.step()
        second.zero_grad()
        other = maker(x).square().mean()
        other.backward()
        second.step()
        losses += [loss.item(), other.item()]
    return losses


def lbfgs() -> list[float]:
    model, losses = net().eval(), []
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)
    x, y = data().tensors

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return losses


def scaled(bad: int = 2) -> list[float]:
    """One step's gradients are infinite; the scaler skips it."""
    model, losses = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number, (x, y) in enumerate(DataLoader(data(), batch_size=8)):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        if number == bad:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


PROGRAMS = (plain, accumulating, gan, lbfgs, scaled)
