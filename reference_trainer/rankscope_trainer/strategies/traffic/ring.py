"""What a ring sends: nothing but the gradient, cut into as many pieces as there are ranks."""

from __future__ import annotations

from rankscope_trainer.settings import Settings
from rankscope_trainer.strategies.ring import padded_length
from rankscope_trainer.strategies.strategy import build_model
from rankscope_trainer.strategies.traffic.message import (
    FLOAT32_BYTES,
    STARTUP,
    Message,
    Traffic,
)


def traffic(
    settings: Settings, rank: int, world_size: int, resumed_after: int
) -> dict[int, Traffic]:
    """Return what one rank sends, by step: the same in each, and nothing before the first."""
    numbers = padded_length(sum(p.numel() for p in build_model(settings).parameters()), world_size)
    step_traffic = ring_all_reduce_traffic(numbers * FLOAT32_BYTES, world_size)
    if settings.reduce_with == "library":
        step_traffic = Traffic([Message("all_reduce", numbers * FLOAT32_BYTES)])
    by_step = {step: Traffic(step_traffic) for step in range(resumed_after + 1, settings.steps + 1)}
    return {STARTUP: Traffic(), **by_step}


def ring_all_reduce_traffic(num_bytes: int, world_size: int) -> Traffic:
    """Return the 2 (N - 1) pieces that a rank sends, and as many that it receives."""
    piece = num_bytes // world_size
    messages = 2 * (world_size - 1)
    return Traffic({Message("send", piece): messages, Message("recv", piece): messages})
