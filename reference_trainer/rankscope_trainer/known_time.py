"""Layers whose computation takes a known time, because they sleep for most of it.

On a machine with fewer cores than ranks the ranks would wait for each other's processor time. A
sleep needs no core, so the idle time that a schedule leaves is then all that is left to see. What
the model computes does not change. `t` is the time of a layer for one microbatch:

    forward            t
    backward           t for the gradient of its input, t for those of its weights

The two halves of the backward stay apart, as a zero-bubble schedule runs them at different times.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rankscope_trainer.model import GPT


class _Sleep(torch.autograd.Function):
    """Passes a tensor on, and later its gradient, each after a sleep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        """Sleep for the forward."""
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()  # no view: a zero-bubble schedule detaches what leaves a stage

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None]:
        """Sleep for the gradient of the input."""
        time.sleep(ctx.seconds)
        return gradients[0], None


def layer_times(text: str, layers: int) -> list[float]:
    """Return the seconds of each layer: the text holds one number for all, or one for each."""
    seconds = [float(part) for part in text.split(",")] if text else [0.0]
    return seconds * layers if len(seconds) == 1 else seconds


def make_times_known(model: GPT, seconds: Sequence[float]) -> None:
    """Let each layer of the whole model sleep for its time."""
    for block, own_seconds in zip(model.blocks.values(), seconds, strict=True):
        if own_seconds:
            _make_time_known(block, own_seconds)


def _make_time_known(block: torch.nn.Module, seconds: float) -> None:
    apply: Any = _Sleep.apply  # has types from PyTorch 2.14 on

    def after_forward(_block: Any, _inputs: Any, x_BTD: Tensor) -> Any:
        return apply(x_BTD, seconds)

    def on_gradient(_gradient: Tensor) -> None:
        time.sleep(seconds)

    hooked: set[torch.nn.Parameter] = set()

    def before_forward(block: torch.nn.Module, _inputs: Any) -> None:
        # One of its weights is enough. Strategies that cut weights put others in their place,
        # after the model is built.
        weight = next(block.parameters())
        if weight not in hooked:
            hooked.add(weight)
            weight.register_hook(on_gradient)

    block.register_forward_pre_hook(before_forward)
    block.register_forward_hook(after_forward)
