"""Other stages out of the weights of stages: a pipeline that continues with more ranks, or fewer.

    3 ranks   0 1 2 | 3 4 | 5 6 7        each part names its tensors as the whole model does, so
    2 ranks   0 1 2 3 | 4 5 6 7          every rank takes from all parts what it holds now

The state of an optimizer has numbers in place of names; a part of a checkpoint says which is which.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

_OF_SEVERAL_STAGES = re.compile(r"^.*?(?=(blocks|embedding|head)\.)")


def recut(
    parts: Sequence[dict[str, Any]], model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Give model and optimizer of this rank what the parts of all ranks say of its layers."""
    weights: dict[str, torch.Tensor] = {}
    states: dict[str, Any] = {}
    for part in parts:
        weights |= {_whole_name(name): tensor for name, tensor in part["model"].items()}
        names = [_whole_name(name) for name in part["parameters"]]
        states |= {names[number]: state for number, state in part["optimizer"]["state"].items()}
    model.load_state_dict({name: weights[_whole_name(name)] for name in model.state_dict()})
    own = [_whole_name(name) for name, _ in model.named_parameters()]
    document = optimizer.state_dict()
    document["state"] = {number: states[name] for number, name in enumerate(own) if name in states}
    optimizer.load_state_dict(document)


def _whole_name(name: str) -> str:
    """Return what a tensor is called in the whole model; several stages of a rank are counted."""
    return _OF_SEVERAL_STAGES.sub("", name)
