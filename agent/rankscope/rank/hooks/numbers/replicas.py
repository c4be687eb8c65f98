"""Checksums of the parameters of models under DDP: replicas that differ in one bit differ here.

The bits of each parameter are added up as 64-bit integers, which no order of addition changes,
so the sum is the same on every rank that holds the same bits.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

from rankscope.rank.context import Context
from rankscope.rank.steps import EndedStep

_BUDGET_SHARE = 0.25
_MASK = (1 << 64) - 1
_EXACT = (1 << 53) - 1  # integers that a float holds
_PART = 1 << 20  # bytes that are widened at a time where they are not aligned


class Replicas:
    """Models under DDP, and every so many steps a checksum of all bits of their parameters."""

    name: ClassVar[str] = "replicas"
    needs: ClassVar[str] = "torch.nn.parallel.distributed"

    def install(self, context: Context) -> str:
        """Learn of each model that is wrapped; listen to steps."""
        from torch.nn.parallel.distributed import DistributedDataParallel

        self._context = context
        every = 1 << max(0, context.settings.replica_check_steps - 1).bit_length()
        self._schedule = context.schedule(self.name, every, _BUDGET_SHARE)

        context.on_new(DistributedDataParallel, context.replicated.add)
        context.listen("step", self._step, sampled=True)
        return f"each {every}th step, less often where that costs too much"

    def _step(self, ended: EndedStep) -> None:
        if not self._schedule.wants(ended.step) or len(self._context.replicated) != 1:
            return
        (model,) = self._context.replicated
        if model.process_group.size() < 2:
            return
        began = time.thread_time_ns()
        checksum(self._context, model)
        self._schedule.spent(time.thread_time_ns() - began, self._context.metrics.step_ns)


def checksum(context: Context, model: Any) -> None:
    """Write the checksum of a model's parameters down."""
    import torch

    sums = [
        bits(parameter) for parameter in model.parameters() if type(parameter) is torch.nn.Parameter
    ]
    known = [total for total in sums if total is not None]
    if known and len({total.device for total in known}) == 1:
        context.metrics.put_tensor("replica_checksum", torch.stack(known), mixed)


def bits(parameter: Any) -> Any:
    """Return the sum of a parameter's bits as a 64-bit integer tensor, None if it has gaps."""
    import torch

    flat = parameter.detach()
    if flat.layout is not torch.strided or flat.numel() == 0:
        return None
    if not flat.is_contiguous():
        if flat.ndim != 4 or not flat.is_contiguous(memory_format=torch.channels_last):
            return None
        flat = flat.permute(0, 2, 3, 1)
    flat = flat.reshape(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8 if flat.storage_offset() % 8 == 0 else 0
    parts = [flat[:whole].view(torch.int64).sum()] if whole else []
    for at in range(whole, flat.numel(), _PART):
        parts.append(flat[at : at + _PART].sum(dtype=torch.int64) * 0x9E3779B1)
    return torch.stack(parts).sum()


def mixed(sums: Any) -> float:
    """Return one number of 53 bits from the sums of all parameters; their order counts."""
    value = 0
    for total in sums.tolist():
        value = (value * 0x100000001B3 ^ (total & _MASK)) & _MASK
    return float((value ^ value >> 53) & _EXACT)
