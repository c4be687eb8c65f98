"""What model parallel sends: the whole batch over each border, once forward and once backward."""

from __future__ import annotations

from rankscope_trainer.settings import Settings
from rankscope_trainer.strategies.traffic.message import (
    FLOAT32_BYTES,
    STARTUP,
    Message,
    Traffic,
)
from rankscope_trainer.strategies.traffic.pipeline import split_startup


def traffic(
    settings: Settings, rank: int, world_size: int, resumed_after: int
) -> dict[int, Traffic]:
    """Return what one rank sends, by step."""
    by_step = {STARTUP: split_startup(settings, world_size)}
    for step in range(resumed_after + 1, settings.steps + 1):
        by_step[step] = _pass(settings, rank, world_size, is_training=True)
        if settings.takes_norm:
            by_step[step][Message("all_reduce", FLOAT32_BYTES)] += 1
        if settings.validate_every and step % settings.validate_every == 0:
            for _ in range(settings.validate_batches):
                by_step[step] += _pass(settings, rank, world_size, is_training=False)
    return by_step


def _pass(settings: Settings, rank: int, world_size: int, *, is_training: bool) -> Traffic:
    sequences = settings.batch_size * settings.microbatches_for(world_size)
    activation = sequences * settings.context * settings.width * FLOAT32_BYTES
    before, after = int(rank > 0), int(rank < world_size - 1)
    received, sent = (before + after, before + after) if is_training else (before, after)
    return Traffic({Message("recv", activation): received, Message("send", activation): sent})
