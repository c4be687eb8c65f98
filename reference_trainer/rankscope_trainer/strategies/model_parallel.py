"""Model parallel without a pipeline: the layers are on several ranks, the batch stays in one piece.

    rank 0   F  .  .  .  .  B        one batch, 3 ranks: at any time one rank computes
    rank 1   .  F  .  .  B  .        and all others wait for it
    rank 2   .  .  F  B  .  .

This is the mistake that pipelining repairs: the model fits, and p ranks are as slow as one, as each
is idle for (p - 1) / p of the time. It is `pipeline` with a single microbatch, and its gradient is
the same. Written with plain send and recv, to show that a stage is nothing but a piece of the
chain rule: it receives its input x and sends y = f(x), and later receives dL/dy and sends dL/dx.
All ranks draw the same batch: the first stage uses its bytes, the last one its targets.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

import rankscope
from rankscope_trainer.data import Sample
from rankscope_trainer.model import next_byte_loss
from rankscope_trainer.strategies.stages.recut import recut
from rankscope_trainer.strategies.stages.split import agree_on_split, clip_parts, write_split
from rankscope_trainer.strategies.strategy import Strategy, build_model, build_optimizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope_trainer.settings import Settings
    from rankscope_trainer.world import World


class ModelParallel(Strategy):
    """One stage of the model, which waits for the stage before it, and then for the one after."""

    shard, num_shards = 0, 1
    is_replicated = False
    can_recut = True

    def __init__(self, settings: Settings, world: World) -> None:
        """Keep this rank's layers."""
        self.microbatches = settings.microbatches_for(world.world_size)
        self._rank, self._device, self._width = world.rank, world.device, settings.width
        self._is_first = world.rank == 0
        self.reports_loss = self.writes_losses = world.rank == world.world_size - 1
        split = agree_on_split(settings, world, world.world_size)
        self._split = write_split([len(layers) for layers in split])
        self._own_layers = split[world.rank]
        self.model = build_model(settings).keep_layers(self._own_layers).to(world.device)
        self.optimizer = build_optimizer(settings, self.model)
        self._waited_seconds = 0.0
        rankscope.stage(world.rank, world.world_size, microbatches=1)

    def train_batch(self, batch: Sample) -> Tensor | None:
        """Wait for the input, compute, pass it on; then the same backwards."""
        self._waited_seconds = 0.0
        x, y = self._forward(batch)
        if self.reports_loss:
            loss = next_byte_loss(y, batch[1])
            loss.backward()
        else:
            self._send(y, self._rank + 1)
            y.backward(self._receive(torch.empty_like(y), self._rank + 1))
        if not self._is_first:
            assert x.grad is not None
            self._send(x.grad, self._rank - 1)
        return loss.detach() if self.reports_loss else None

    def validation_loss(self, batch: Sample) -> Tensor | None:
        """Go forward only."""
        _, y = self._forward(batch)
        if self.reports_loss:
            return next_byte_loss(y, batch[1])
        self._send(y, self._rank + 1)
        return None

    def clip(self, max_norm: float) -> float:
        """Clip by the norm over all stages, to which each contributes its own squares."""
        return clip_parts(self.model, max_norm)

    def metrics(self) -> dict[str, float]:
        """Return how many layers this rank holds, and for how long it waited in this step."""
        return {"layers": float(len(self._own_layers)), "waited_seconds": self._waited_seconds}

    def recut(self, parts: Sequence[dict[str, Any]]) -> None:
        """Take the layers that this rank holds now."""
        recut(parts, self.model, self.optimizer)

    def checkpoint_shape(self) -> dict[str, str]:
        """Return which rank holds what: only with other ranks are parts cut anew."""
        return {"stage_layers": self._split}

    def _forward(self, batch: Sample) -> tuple[Tensor, Tensor]:
        """Return input and output of this stage."""
        x = batch[0]
        if not self._is_first:
            x = torch.empty((*x.shape, self._width), device=self._device, requires_grad=True)
            with torch.no_grad():
                self._receive(x, self._rank - 1)
        y: Tensor = self.model(x)
        return x, y

    def _send(self, tensor: Tensor, rank: int) -> None:
        since = time.perf_counter()
        dist.send(tensor.detach(), rank)
        self._waited_seconds += time.perf_counter() - since

    def _receive(self, tensor: Tensor, rank: int) -> Tensor:
        since = time.perf_counter()
        dist.recv(tensor, rank)
        self._waited_seconds += time.perf_counter() - since
        return tensor
