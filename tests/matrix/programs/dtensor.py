"""DTensor and tensor parallelism: redistribution is functional collectives."""

from __future__ import annotations

import torch
from ledger import Ledger, zeros
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

FLOAT = torch.float32


def run(ledger: Ledger) -> None:
    n = ledger.size
    mesh = init_device_mesh("cpu", (n,))
    group = mesh.get_group()
    whole = torch.ones(n * 2, n * 3)
    root = ledger.rank == 0

    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    part = zeros(whole.nbytes // n, FLOAT)
    ledger.did("scatter", [part] * (n * root), [part], group=group, peer=0)
    copy = distribute_tensor(whole, mesh, [Replicate()])
    ledger.did("broadcast", [whole] * root, [whole], group=group, peer=0)
    assert copy.to_local().shape == whole.shape

    sharded.redistribute(mesh, [Replicate()]).to_local().sum().item()
    ledger.did("all_gather_into_tensor_coalesced", [part], [whole], group=group, waited="c++")
    sharded.redistribute(mesh, [Shard(1)]).to_local().sum().item()
    # gloo cannot exchange all to all in this way: DTensor gathers instead
    ledger.did("all_gather_into_tensor_coalesced", [part], [whole], group=group, waited="c++")
    partial = DTensor.from_local(whole, mesh, [Partial()])
    partial.redistribute(mesh, [Replicate()]).to_local().sum().item()
    ledger.did("all_reduce", [whole], [whole], group=group, reduce="sum", waited="c++")
    partial.redistribute(mesh, [Shard(0)]).to_local().sum().item()
    ledger.did(
        "reduce_scatter_tensor_coalesced", [whole], [part], group=group, reduce="sum",
        waited="c++",
    )  # fmt: skip
    _tensor_parallel(ledger)


def _tensor_parallel(ledger: Ledger) -> None:
    """A column-parallel layer into a row-parallel one: one all_reduce forward, one backward."""
    n = ledger.size
    mesh = init_device_mesh("cpu", (n,))
    group = mesh.get_group()
    first, second = nn.Linear(8, 4 * n, bias=False), nn.Linear(4 * n, 6, bias=False)
    model = nn.Sequential(first, nn.ReLU(), second)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    weights = [first.weight, second.weight]
    model = parallelize_module(model, mesh, plan)
    for weight in weights:  # each is scattered from rank 0
        part = zeros(weight.nbytes // n, FLOAT)
        ledger.did("scatter", [part] * (n * (ledger.rank == 0)), [part], group=group, peer=0)
    for _ in range(2):
        x = torch.ones(5, 8, requires_grad=True)
        output = model(x)
        output.sum().backward()
        y = zeros(5 * 6 * 4, FLOAT)
        ledger.did("all_reduce", [y], [y], group=group, reduce="sum", waited="c++")
        ledger.did("all_reduce", [x], [x], group=group, reduce="sum", waited="c++")
        assert x.grad is not None
        x.grad.sum().item()
