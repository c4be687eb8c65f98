"""Pipeline parallel: every rank holds some layers; microbatches flow through the ranks.

    gpipe, 2 stages, 4 microbatches           1f1b, the same
    rank 0   F0 F1 F2 F3 .. .. B0 B1 B2 B3    rank 0   F0 F1 .. B0 F2 B1 F3 B2 .. B3
    rank 1   .. F0 F1 F2 F3 B0 B1 B2 B3       rank 1   .. F0 B0 F1 B1 F2 B2 F3 B3

A stage receives activations from the one before and sends its own to the next; gradients travel
the other way. Both schedules compute the same gradient; 1f1b needs memory for as many
microbatches as there are stages, gpipe for all. The schedules are PyTorch's own. All ranks draw
the same batch: the first stage uses its bytes, the last one its targets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from rankscope_trainer.data import Sample
from rankscope_trainer.model import VOCABULARY, next_byte_loss
from rankscope_trainer.strategies.strategy import Strategy, build_model, build_optimizer

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings
    from rankscope_trainer.world import World

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Pipeline(Strategy):
    """One stage of the model, and the schedule that all stages follow together."""

    shard, num_shards = 0, 1
    is_replicated = False

    def __init__(self, settings: Settings, world: World) -> None:
        """Keep this rank's layers and tell the library the shapes that travel between stages."""
        self.microbatches = settings.microbatches_for(world.world_size)
        self._is_first = world.rank == 0
        self.reports_loss = self.writes_losses = world.rank == world.world_size - 1
        self.model = build_model(settings).keep_stage(world.rank, world.world_size)
        self.model.to(world.device)
        self.optimizer = build_optimizer(settings, self.model)
        self._stage = PipelineStage(
            self.model,
            world.rank,
            world.world_size,
            world.device,
            # With both shapes known the library exchanges no metadata before the first step.
            input_args=_example(settings, settings.width if world.rank else 0),
            output_args=_example(settings, VOCABULARY if self.reports_loss else settings.width),
        )
        self._schedule = SCHEDULES[settings.schedule](
            self._stage, self.microbatches, loss_fn=next_byte_loss
        )

    def train_batch(self, batch: Sample) -> Tensor | None:
        """Run the schedule once: all forwards and backwards of this stage."""
        return self._run(self._schedule.step, batch)

    def validate_batch(self, batch: Sample) -> Tensor | None:
        """Run the schedule without backwards."""
        return self._run(self._schedule.eval, batch)

    def clip(self, max_norm: float) -> float:
        """Clip by the norm over all stages, to which each contributes its own squares."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        squares = torch.nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(squares)
        norm = squares.sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), max_norm, norm)
        return float(norm)

    def _run(self, schedule: Callable[..., object], batch: Sample) -> Tensor | None:
        bytes_BT, next_BT = batch
        losses: list[Tensor] = []
        own = (bytes_BT,) if self._is_first else ()
        schedule(
            *own,
            target=next_BT if self.reports_loss else None,
            losses=losses if self.reports_loss else None,
            return_outputs=False,  # nobody needs the scores, so they are not kept
        )
        return torch.stack(losses).detach().mean() if losses else None


def _example(settings: Settings, features: int) -> Tensor:
    """Return a tensor of the shape and kind that one microbatch has at a border of a stage."""
    shape = (settings.batch_size, settings.context)
    if not features:
        return torch.empty(shape, dtype=torch.long, device="meta")
    return torch.empty((*shape, features), device="meta", requires_grad=True)
