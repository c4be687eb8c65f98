"""A stage of PyTorch's pipelines, and one pass of their schedules, in every version of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from rankscope_trainer.data import Sample
from rankscope_trainer.settings import Settings

# The outputs of the last stage are not used; PyTorch 2.9 and older always return them.
_KNOWN = inspect.signature(ScheduleGPipe.step).parameters
_WITHOUT_OUTPUTS = {"return_outputs": False} if "return_outputs" in _KNOWN else {}


class Stage(PipelineStage):
    """PyTorch's stage, whose first message to its neighbours has one size at both ends.

    PyTorch 2.9 sends 8 bytes to a neighbour that expects 4, which gloo refuses.
    """

    def _get_init_p2p_neighbors_ops(self) -> Any:
        operations = super()._get_init_p2p_neighbors_ops()
        for operation in operations:
            operation.tensor = operation.tensor.float()
        return operations


def example(settings: Settings, features: int, *, positions: int | None = None) -> Tensor:
    """Return a tensor of the shape and kind that one microbatch has at a border of a stage.

    Without `features` it holds the bytes themselves. With both shapes known the library exchanges
    no metadata before the first step.
    """
    shape = (settings.batch_size, positions or settings.context)
    if not features:
        return torch.empty(shape, dtype=torch.long, device="meta")
    return torch.empty((*shape, features), device="meta", requires_grad=True)


def run_schedule(
    schedule: Callable[..., object], batch: Sample, *, is_first: bool, is_last: bool
) -> Tensor | None:
    """Call `step` or `eval` of a schedule; return the mean loss where this rank has one.

    `batch`: bytes and next bytes, each (batch, time); the first stage takes the former, the last
    one the latter.
    """
    bytes_BT, next_BT = batch
    losses: list[Tensor] = []
    schedule(
        *((bytes_BT,) if is_first else ()),
        target=next_BT if is_last else None,
        losses=losses if is_last else None,
        **_WITHOUT_OUTPUTS,
    )
    return torch.stack(losses).detach().mean() if losses else None
