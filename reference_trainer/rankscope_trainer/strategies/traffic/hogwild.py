"""What Hogwild sends: the name of its memory, once. Weights and gradients are never sent.

A barrier each ends the start-up, the last step, and the loading of a checkpoint; before a
checkpoint is another one.
"""

from __future__ import annotations

from rankscope_trainer.settings import Settings
from rankscope_trainer.strategies.hogwild import NAME_BYTES
from rankscope_trainer.strategies.traffic.message import STARTUP, Message, Traffic

BARRIER = Message("barrier", 0)


def traffic(
    settings: Settings, rank: int, world_size: int, resumed_after: int
) -> dict[int, Traffic]:
    """Return what one rank sends, by step: the same for all ranks."""
    barriers = 2 + bool(resumed_after)  # the file is mapped, the weights are there
    by_step = {STARTUP: Traffic({Message("broadcast", NAME_BYTES): 1, BARRIER: barriers})}
    for step in range(resumed_after + 1, settings.steps + 1):
        is_saved = bool(settings.checkpoint_dir) and step % settings.checkpoint_every == 0
        by_step[step] = Traffic({BARRIER: is_saved + (step == settings.steps)})
    return by_step
