"""FSDP2, `fully_shard`: one gather and one scatter per layer."""

from __future__ import annotations

import torch
from ledger import VERSION, Ledger, zeros
from torch import nn

FLOAT = torch.float32


def skipped() -> str:
    if VERSION < (2, 7):
        return (
            "fully_shard fails on the CPU in this PyTorch, also without the agent: "
            "AttributeError: 'Stream' object has no attribute 'record_event'"
        )
    return ""


def run(ledger: Ledger) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ledger.size,))
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))
    layer_bytes = [layer.weight.nbytes for layer in model]
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = mesh.get_group()
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for index in (0, 1, 1, 0):  # forward; backward again, the next layer ahead of its use
            whole = zeros(layer_bytes[index], FLOAT)
            shard = zeros(layer_bytes[index] // ledger.size, FLOAT)
            ledger.did("all_gather_into_tensor", [shard], [whole], group=group)
        for index in (1, 0):
            whole = zeros(layer_bytes[index], FLOAT)
            shard = zeros(layer_bytes[index] // ledger.size, FLOAT)
            ledger.did("reduce_scatter_tensor", [whole], [shard], group=group, reduce="avg")
