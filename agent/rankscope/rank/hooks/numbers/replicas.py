"""Checksums of the parameters of models under DDP: replicas that differ in one bit differ here.

The bits of each parameter are added up as 64-bit integers, which no order of addition changes,
so the sum is the same on every rank that holds the same bits.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar

from rankscope.rank.events import listen
from rankscope.rank.guard import guarded
from rankscope.rank.sampling_schedule import Grid
from rankscope.rank.steps import EndedStep

if TYPE_CHECKING:
    from rankscope.rank.runtime import Agent

_MASK = (1 << 64) - 1
_EXACT = (1 << 53) - 1  # integers that a float holds
_PART = 1 << 20  # bytes that are widened at a time where they are not aligned


class Replicas:
    """Models under DDP, and every so many steps a checksum of all bits of their parameters."""

    name: ClassVar[str] = "replicas"
    needs: ClassVar[str] = "torch.nn.parallel.distributed"

    def install(self, agent: Agent) -> str:
        """Learn of each model that is wrapped; listen to steps."""
        from torch.nn.parallel.distributed import DistributedDataParallel

        original: Any = DistributedDataParallel.__init__
        self._agent = agent
        every = 1 << max(0, agent.settings.replica_check_steps - 1).bit_length()
        grid = Grid(every, agent.settings.numbers_budget_ratio / 4)
        self._grid = agent.grids.setdefault(self.name, grid)

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            wrapped(self)

        @guarded
        def wrapped(model: Any) -> None:
            agent.replicated.add(model)

        agent.patch(DistributedDataParallel, "__init__", __init__)
        listen(agent, "step", self._step, sampled=True)
        return f"each {every}th step, less often where that costs too much"

    def _step(self, ended: EndedStep) -> None:
        if not self._grid.wants(ended.step) or len(self._agent.replicated) != 1:
            return
        (model,) = self._agent.replicated
        if model.process_group.size() < 2:
            return
        began = time.thread_time_ns()
        checksum(self._agent, model)
        self._grid.spent(time.thread_time_ns() - began, self._agent.sheet.step_ns)


def checksum(agent: Agent, model: Any) -> None:
    """Write the checksum of a model's parameters down."""
    import torch

    sums = [bits(one) for one in model.parameters() if type(one) is torch.nn.Parameter]
    known = [one for one in sums if one is not None]
    if known and len({one.device for one in known}) == 1:
        agent.sheet.put_tensor("replica_checksum", torch.stack(known), mixed)


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
    for one in sums.tolist():
        value = (value * 0x100000001B3 ^ (one & _MASK)) & _MASK
    return float((value ^ value >> 53) & _EXACT)
