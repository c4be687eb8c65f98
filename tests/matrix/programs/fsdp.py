"""FSDP, the first: a flat parameter per unit, gathered in lists on the CPU."""

from __future__ import annotations

import torch
from ledger import Ledger, quiet, zeros
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

FLOAT = torch.float32


def run(ledger: Ledger) -> None:
    inner, outer = nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False)
    inner_bytes, outer_bytes = inner.weight.nbytes, outer.weight.nbytes
    with quiet():
        wrapped = FullyShardedDataParallel(inner, device_id=torch.device("cpu"))
        model = FullyShardedDataParallel(
            nn.Sequential(wrapped, outer), device_id=torch.device("cpu")
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        with quiet():
            model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        _gathered(ledger, outer_bytes)  # the root keeps its parameters for the backward pass
        _gathered(ledger, inner_bytes)
        _scattered(ledger, outer_bytes, inner_bytes)


def _gathered(ledger: Ledger, num_bytes: int) -> None:
    shard = zeros(num_bytes // ledger.size, FLOAT)
    ledger.did("all_gather", [shard], [shard] * ledger.size, waited="python")


def _scattered(ledger: Ledger, outer_bytes: int, inner_bytes: int) -> None:
    """Backward: the inner unit is gathered again, then gradients are scattered."""
    _gathered(ledger, inner_bytes)
    for num_bytes in (inner_bytes, outer_bytes):
        shard = zeros(num_bytes // ledger.size, FLOAT)
        ledger.did("reduce_scatter_tensor", [zeros(num_bytes, FLOAT)], [shard], reduce="sum")
