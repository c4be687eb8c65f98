"""How many stages a pipeline has, and which rank holds which; nothing here imports torch.

2 ranks                       rank 0    rank 1
gpipe, 1f1b                   0         1
interleaved, zero_bubble      0  2      1  3      a loop: stage s is on rank s modulo 2
zero_bubble_v                 0  3      1  2      a V: down the ranks and back up
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings

SEVERAL_STAGES = ("interleaved", "zero_bubble", "zero_bubble_v")  # on each rank


def num_stages(settings: Settings, world_size: int) -> int:
    """Return the stages of the whole pipeline."""
    is_several = settings.strategy == "pipeline" and settings.schedule in SEVERAL_STAGES
    return world_size * (settings.virtual_stages if is_several else 1)


def rank_of_stage(settings: Settings, stage: int, world_size: int) -> int:
    """Return the rank that holds a stage."""
    turn, place = divmod(stage, world_size)
    is_way_back = settings.schedule == "zero_bubble_v" and turn % 2 == 1
    return world_size - 1 - place if is_way_back else place
