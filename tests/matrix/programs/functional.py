"""Functional collectives: out of place, waited for in C++ when the result is first used."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ledger import VERSION, Ledger

LATE_SECONDS = 0.3  # of rank 0, so that the others are seen to wait


def run(ledger: Ledger) -> None:
    n, world = ledger.size, dist.group.WORLD
    x = torch.ones(20)
    y = funcol.all_reduce(x, "sum", world)
    ledger.did("all_reduce", [x], [x], reduce="sum", waited="c++")
    (y + 1).sum().item()  # waits
    y = funcol.all_reduce(x, "max", world)
    funcol.wait_tensor(y)
    ledger.did("all_reduce", [x], [x], reduce="max", waited="c++")
    y = funcol.all_gather_tensor(x, 0, world).sum()
    # torch's functional form of one tensor is its coalesced form of one
    ledger.did("all_gather_into_tensor_coalesced", [x], [torch.empty(20 * n)], waited="c++")
    given = torch.ones(n * 3, 2)
    y = funcol.reduce_scatter_tensor(given, "sum", 0, world).sum()
    ledger.did(
        "reduce_scatter_tensor_coalesced", [given], [torch.empty(3, 2)], reduce="sum", waited="c++"
    )
    y = funcol.all_to_all_single(given, None, None, world).sum()
    ledger.did("all_to_all_single", [given], [given], waited="c++")
    y = funcol.broadcast(x, 1, world).sum()
    ledger.did("broadcast", [x] * (ledger.rank == 1), [x], peer=1, waited="c++")
    _coalesced(ledger)
    _autograd(ledger)
    late(ledger)


def _coalesced(ledger: Ledger) -> None:
    n, world = ledger.size, dist.group.WORLD
    tensors = [torch.ones(4), torch.ones(6)]
    results = funcol.all_reduce_coalesced(tensors, "sum", world)
    ledger.did("all_reduce_coalesced", tensors, tensors, reduce="sum", waited="c++")
    assert [float(result.sum()) for result in results] == [4.0 * n, 6.0 * n]
    results = funcol.all_gather_into_tensor_coalesced(tensors, world)
    whole = [torch.empty(n * tensor.numel()) for tensor in tensors]
    ledger.did("all_gather_into_tensor_coalesced", tensors, whole, waited="c++")
    assert [float(result.sum()) for result in results] == [4.0 * n, 6.0 * n]
    given = [torch.ones(n * 2), torch.ones(n * 5)]
    results = funcol.reduce_scatter_tensor_coalesced(given, "sum", [0, 0], world)
    parts = [torch.empty(2), torch.empty(5)]
    ledger.did("reduce_scatter_tensor_coalesced", given, parts, reduce="sum", waited="c++")
    assert [float(result.sum()) for result in results] == [2.0 * n, 5.0 * n]


def _autograd(ledger: Ledger) -> None:
    n, world = ledger.size, dist.group.WORLD
    # before 2.13 the autograd forms wait below all operators
    autograd_waits = "c++" if VERSION >= (2, 13) else "inside"
    x = torch.ones(8, requires_grad=True)
    whole = funcol.all_gather_tensor_autograd(x, 0, world)
    ledger.did("all_gather_into_tensor_coalesced", [x], [torch.empty(8 * n)], waited="c++")
    whole.square().sum().backward()  # a gradient in one piece: 2.9 asks for it
    ledger.did(
        "reduce_scatter_tensor_coalesced",
        [torch.empty(8 * n)],
        [x],
        reduce="sum",
        waited=autograd_waits,
    )
    x = torch.ones(8 * n, requires_grad=True)
    part = funcol.reduce_scatter_tensor_autograd(x, "sum", 0, world)
    ledger.did(
        "reduce_scatter_tensor_coalesced",
        [x],
        [torch.empty(8)],
        reduce="sum",
        waited=autograd_waits,
    )
    part.square().sum().backward()
    ledger.did("all_gather_into_tensor_coalesced", [torch.empty(8)], [x], waited="c++")


def late(ledger: Ledger) -> None:
    """Rank 0 comes late to a collective and to a reduce_scatter: the others wait in C++."""
    world, n = dist.group.WORLD, ledger.size
    for _ in range(2):
        dist.barrier()
        ledger.did("barrier")
        if ledger.rank == 0:
            time.sleep(LATE_SECONDS)
        funcol.wait_tensor(funcol.all_reduce(torch.ones(2), "sum", world))
        ledger.did("all_reduce", [torch.ones(2)], [torch.ones(2)], reduce="sum", waited="c++")
        if ledger.rank == 0:
            time.sleep(LATE_SECONDS)
        given = torch.ones(n * 2)
        funcol.wait_tensor(funcol.reduce_scatter_tensor(given, "sum", 0, world))
        ledger.did(
            "reduce_scatter_tensor_coalesced", [given], [torch.ones(2)], reduce="sum", waited="c++"
        )
