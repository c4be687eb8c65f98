"""Flips one bit of one number of a tensor, and says exactly which."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rankscope_trainer.faults.fault import FaultContext


def flip_bit(tensor: Tensor, context: FaultContext, *, of: str) -> None:
    """Flip a bit in place, chosen by rank and step alone; what was done goes into the facts.

    All bits are as likely as each other, so most flips are small: that is what makes silent
    corruption silent. A tensor that is spread over ranks has its local part changed.
    """
    import torch

    choice = random.Random(f"{context.rank} {context.step}")
    local: Tensor = tensor.detach()
    local = getattr(local, "_local_tensor", local)  # of a DTensor
    flat = local.reshape(-1) if local.is_contiguous() else local.contiguous().view(-1)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    index = choice.randrange(flat.numel())
    bit = choice.randrange(8 * flat.element_size())
    number = flat[index : index + 1].clone()
    # A signed integer has no positive number of its highest bit alone.
    mask = -(2**bit) if bit == 8 * flat.element_size() - 1 else 2**bit
    flipped = (number.view(integers) ^ mask).view(flat.dtype)
    position = [int(part) for part in torch.unravel_index(torch.tensor(index), local.shape)]
    local[tuple(position)] = flipped[0]
    before, after = float(number), float(flipped)
    context.tell(tensor=of, index=position, bit=bit, before=before.hex(), after=after.hex())


def choose_parameter(model: nn.Module, context: FaultContext) -> tuple[str, nn.Parameter]:
    """Return one of the model's parameters, chosen by rank and step alone."""
    choice = random.Random(f"{context.step} {context.rank}")
    return choice.choice(list(model.named_parameters()))
