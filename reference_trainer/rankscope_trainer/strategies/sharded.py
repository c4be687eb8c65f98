"""What strategies share whose tensors are cut apart over ranks (`DTensor`): checkpoints, clipping.

A DTensor knows its mesh of ranks and which part of the whole tensor this rank holds. So each rank
writes only its own part of a checkpoint, into one folder, and PyTorch's distributed checkpoint
(DCP) notes there which file holds which part of which tensor; copies are written once.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from rankscope_trainer.strategies.strategy import Strategy

# One entry for each parameter, by its name: pipeline stages then share nothing, not even a list.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


class ShardedStrategy(Strategy):
    """A strategy whose model and optimizer consist of DTensors."""

    is_replicated = False
    is_sharded = True
    stages: dist.ProcessGroup | None = None  # the ranks that hold the other layers, if any do

    def clip(self, max_norm: float) -> float:
        """Clip by the norm of the whole gradient; each rank has the squares of its own parts."""
        parameters = list(self.model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = _whole(torch.nn.utils.get_total_norm(gradients))
        if self.stages is not None:
            squares = norm.square()
            dist.all_reduce(squares, group=self.stages)
            norm = squares.sqrt()
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return float(norm)

    def save(self, folder: Path) -> None:
        """Write this rank's parts; rank 0 writes the list of all parts."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=BY_NAME)
        save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """Read the parts that this rank holds, whichever rank wrote them."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=BY_NAME)
        load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=model,
            optim_state_dict=optimizer,
            options=BY_NAME,
        )


def _whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor of which each rank may hold a part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
