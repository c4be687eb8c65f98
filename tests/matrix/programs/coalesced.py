"""Coalesced operations: many tensors, one collective."""

from __future__ import annotations

import torch
import torch.distributed as dist
from ledger import Ledger, quiet
from torch.distributed.distributed_c10d import _coalescing_manager


def run(ledger: Ledger) -> None:
    n = ledger.size
    tensors = [torch.ones(3), torch.ones(5), torch.ones(7)]
    with quiet():
        dist.all_reduce_coalesced(tensors)
    ledger.did("all_reduce_coalesced", tensors, tensors, reduce="sum")
    whole = [[torch.empty_like(tensor) for tensor in tensors] for _ in range(n)]
    with quiet():
        dist.all_gather_coalesced(whole, tensors)
    ledger.did("all_gather_coalesced", tensors, [part for parts in whole for part in parts])

    for is_async in (False, True):
        with _coalescing_manager(async_ops=is_async) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        if is_async:
            manager.wait()
        ledger.did("all_reduce_coalesced", tensors, tensors, reduce="sum")

    results = [torch.empty(n * tensor.numel()) for tensor in tensors]
    with _coalescing_manager():
        for result, tensor in zip(results, tensors, strict=True):
            dist.all_gather_into_tensor(result, tensor)
    ledger.did("all_gather_into_tensor_coalesced", tensors, results)

    with _coalescing_manager():
        for result, tensor in zip(results, tensors, strict=True):
            dist.reduce_scatter_tensor(tensor, result)
    ledger.did("reduce_scatter_tensor_coalesced", results, tensors, reduce="sum")
