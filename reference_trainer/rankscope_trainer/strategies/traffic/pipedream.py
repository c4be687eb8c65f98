"""What PipeDream sends: activations forward, gradients back, one each for every microbatch.

While the pipeline fills, a stage has forwards without backwards; before a checkpoint and after
the last step it makes up for them.
"""

from __future__ import annotations

from rankscope_trainer.settings import Settings
from rankscope_trainer.strategies.traffic.message import (
    FLOAT32_BYTES,
    STARTUP,
    Message,
    Traffic,
)


def traffic(
    settings: Settings, rank: int, world_size: int, resumed_after: int
) -> dict[int, Traffic]:
    """Return what one rank sends, by step."""
    microbatches = settings.microbatches_for(world_size)
    ahead = world_size - 1 - rank
    in_flight = 0
    by_step = {STARTUP: Traffic()}
    for step in range(resumed_after + 1, settings.steps + 1):
        begun = in_flight + microbatches
        in_flight = 0 if _runs_empty(settings, step) else min(begun, ahead)
        forwards = microbatches
        if settings.validate_every and step % settings.validate_every == 0:
            forwards += microbatches * settings.validate_batches
        by_step[step] = _passes(settings, rank, world_size, forwards, begun - in_flight)
    return by_step


def _runs_empty(settings: Settings, step: int) -> bool:
    is_saved = bool(settings.checkpoint_dir) and step % settings.checkpoint_every == 0
    return is_saved or step == settings.steps


def _passes(
    settings: Settings, rank: int, world_size: int, forwards: int, backwards: int
) -> Traffic:
    """Return what a stage receives and sends in so many forwards and backwards."""
    size = settings.batch_size * settings.context * settings.width * FLOAT32_BYTES
    before, after = rank > 0, rank < world_size - 1
    return Traffic(
        {
            Message("recv", size): before * forwards + after * backwards,
            Message("send", size): after * forwards + before * backwards,
        }
    )
