"""What local SGD sends: the weights, once in `average_every` steps, and otherwise nothing."""

from __future__ import annotations

from rankscope_trainer.settings import Settings
from rankscope_trainer.strategies.strategy import build_model
from rankscope_trainer.strategies.traffic.message import STARTUP, Message, Traffic


def traffic(
    settings: Settings, rank: int, world_size: int, resumed_after: int
) -> dict[int, Traffic]:
    """Return what one rank sends, by step; steps count on through a resumed run."""
    weights = sum(parameter.nbytes for parameter in build_model(settings).parameters())
    by_step = {STARTUP: Traffic()}
    for step in range(resumed_after + 1, settings.steps + 1):
        averages = step % settings.average_every == 0
        by_step[step] = Traffic([Message("all_reduce", weights)] if averages else [])
    return by_step
