"""What all ranks decide together before a step: use this batch, wait for data, or leave?

    rank 0   ok         0      0    ┐                       one corrupt: all skip the batch
    rank 1   corrupt    0      0    ┼ all_reduce(MAX) --->  one without data: all wait
    rank 2   ok         gone   15   ┘                       one with a signal: all leave

Each rank alone would decide differently, and the others would wait for it in the next collective.
The agreement costs 12 bytes in each step, and only where a setting asks for it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings

AGREEMENT_BYTES = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """What one rank says, or all ranks have agreed on."""

    is_corrupt: bool = False
    is_gone: bool = False
    signal: int = 0  # of the operating system; 0: none was received


def needs_agreement(settings: Settings) -> bool:
    """Return whether anything can happen that ranks must agree on."""
    return bool(settings.check_batches or settings.grace_seconds or settings.data_path)


def agree(own: State, device: torch.device) -> State:
    """Return what is so on any rank; all ranks call this, and all get the same."""
    numbers = [own.is_corrupt, own.is_gone, own.signal]
    agreed = torch.tensor(numbers, dtype=torch.int32, device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    is_corrupt, is_gone, signal = agreed.tolist()
    return State(is_corrupt=bool(is_corrupt), is_gone=bool(is_gone), signal=signal)
