"""Ranks that run out of data before the others do.

    uneven_ratio = 0.4, 10 steps
    rank 0   1 2 3 4 5 6 7 8 9 10          has all batches
    rank 1   1 2 3 4 5 6 7 8 + +           has 20 % fewer, then only keeps the others company (+)
    rank 2   1 2 3 4 5 6 + + + +           has 40 % fewer

A collective needs all ranks, so one that simply stopped would leave the others hanging. DDP's
`join` context lets it mirror their collectives with gradients of zero instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings


def last_steps(settings: Settings, world_size: int) -> list[int]:
    """Return the last step for which each rank has a batch; all are `steps` unless uneven."""
    missing = settings.uneven_ratio * settings.steps
    steepness = missing / max(1, world_size - 1)
    return [settings.steps - int(steepness * rank) for rank in range(world_size)]
