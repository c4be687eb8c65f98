"""Functional collectives and plain ones inside a function that torch.compile has taken over."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ledger import Ledger


def run(ledger: Ledger) -> None:
    n = ledger.size

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        reduced = funcol.all_reduce(x * 2, "sum", dist.group.WORLD)
        whole = funcol.all_gather_tensor(x, 0, dist.group.WORLD)
        return reduced.sum() + whole.sum()

    x = torch.ones(16)
    for _ in range(3):
        assert step(x).item() == 16 * 2 * n + 16 * n
        ledger.did("all_reduce", [x], [x], reduce="sum", waited="c++")
        ledger.did("all_gather_into_tensor_coalesced", [x], [torch.ones(16 * n)], waited="c++")
