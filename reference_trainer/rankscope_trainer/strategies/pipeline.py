"""Pipeline parallel: every rank holds some layers; microbatches flow through the ranks.

    gpipe, 2 stages, 4 microbatches           1f1b, the same
    rank 0   F0 F1 F2 F3 .. .. B0 B1 B2 B3    rank 0   F0 F1 .. B0 F2 B1 F3 B2 .. B3
    rank 1   .. F0 F1 F2 F3 B0 B1 B2 B3       rank 1   .. F0 B0 F1 B1 F2 B2 F3 B3

A stage receives activations from the one before and sends its own to the next; gradients travel
the other way. While the pipeline fills and drains, ranks idle: (p - 1) / (m + p - 1) of a step
with p ranks and m microbatches. Both schedules compute the same gradient; 1f1b needs memory for as
many microbatches as there are stages, gpipe for all. Three more make the idle time shorter:

    interleaved      each rank holds v stages (0 and 2, 1 and 3), each a v-th as long: a microbatch
                     reaches the last rank v times sooner, and is sent v times as often
    zero_bubble      the same, and a backward in two parts, I and W: the gradient of the input,
                     for which the stage before waits, at once; those of the weights, for which
                     no rank waits, when there is nothing else to do
                     rank 1   .. F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3
    zero_bubble_v    the same, and two stages on a V (0 and 3, 1 and 2): a microbatch that has come
                     down to the last rank turns at once

The schedules are PyTorch's own. All ranks draw the same batch: the first stage uses its bytes, the
last one its targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from rankscope_trainer.data import Sample
from rankscope_trainer.model import GPT, VOCABULARY, next_byte_loss
from rankscope_trainer.strategies.stages.placement import SEVERAL_STAGES, num_stages, rank_of_stage
from rankscope_trainer.strategies.stages.recut import recut
from rankscope_trainer.strategies.stages.schedule import Stage, example, run_schedule
from rankscope_trainer.strategies.stages.split import agree_on_split, clip_parts, write_split
from rankscope_trainer.strategies.strategy import Strategy, build_model, build_optimizer
from rankscope_trainer.strategies.versions import require_schedule

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings
    from rankscope_trainer.world import World

SCHEDULES: dict[str, Callable[..., Any]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zero_bubble_v": ScheduleZBVZeroBubble,
}


class Pipeline(Strategy):
    """This rank's stages of the model, and the schedule that all ranks follow together."""

    shard, num_shards = 0, 1
    is_replicated = False
    can_recut = True

    def __init__(self, settings: Settings, world: World) -> None:
        """Keep this rank's layers; the library learns the shapes that are sent between stages."""
        require_schedule(settings.schedule, world.device)
        self.microbatches = settings.microbatches_for(world.world_size)
        self._num_stages = num_stages(settings, world.world_size)
        split = agree_on_split(settings, world, self._num_stages)
        self._split = write_split([len(layers) for layers in split])
        ranks = [rank_of_stage(settings, s, world.world_size) for s in range(self._num_stages)]
        self._ranks = ",".join(map(str, ranks))
        own = {stage: split[stage] for stage, rank in enumerate(ranks) if rank == world.rank}
        self._has_first = 0 in own
        self.reports_loss = self.writes_losses = self._num_stages - 1 in own
        self._num_layers = sum(len(layers) for layers in own.values())
        parts = {stage: build_model(settings).keep_layers(own[stage]) for stage in own}
        self.model = parts[world.rank] if len(parts) == 1 else _together(parts)
        self.model.to(world.device)
        self.optimizer = build_optimizer(settings, self.model)
        stages = [self._stage(settings, world.device, stage, part) for stage, part in parts.items()]
        self._schedule = SCHEDULES[settings.schedule](
            stages if settings.schedule in SEVERAL_STAGES else stages[0],
            self.microbatches,
            loss_fn=next_byte_loss,
        )

    def train_batch(self, batch: Sample) -> Tensor | None:
        """Run the schedule once: all forwards and backwards of this rank."""
        return self._run(self._schedule.step, batch)

    def validation_loss(self, batch: Sample) -> Tensor | None:
        """Run the schedule without backwards."""
        return self._run(self._schedule.eval, batch)

    def clip(self, max_norm: float) -> float:
        """Clip by the norm over all stages, to which each contributes its own squares."""
        return clip_parts(self.model, max_norm)

    def metrics(self) -> dict[str, float]:
        """Return how many layers this rank holds."""
        return {"layers": float(self._num_layers)}

    def recut(self, parts: Sequence[dict[str, Any]]) -> None:
        """Take the layers that this rank holds now."""
        recut(parts, self.model, self.optimizer)

    def checkpoint_shape(self) -> dict[str, str]:
        """Return which rank holds what: only with other ranks are parts cut anew."""
        return {"stage_layers": self._split, "stage_ranks": self._ranks}

    def _stage(
        self, settings: Settings, device: torch.device, stage: int, part: nn.Module
    ) -> Stage:
        is_last = stage == self._num_stages - 1
        return Stage(
            part,
            stage,
            self._num_stages,
            device,
            input_args=example(settings, settings.width if stage else 0),
            output_args=example(settings, VOCABULARY if is_last else settings.width),
        )

    def _run(self, schedule: Callable[..., object], batch: Sample) -> Tensor | None:
        return run_schedule(schedule, batch, is_first=self._has_first, is_last=self.reports_loss)


def _together(parts: dict[int, GPT]) -> nn.Module:
    """Return one module that holds all stages of a rank; the schedule calls each by itself."""
    return nn.ModuleDict({str(stage): part for stage, part in parts.items()})
