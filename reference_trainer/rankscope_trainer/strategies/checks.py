"""What a strategy asks of the settings and the world size; nothing here imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope_trainer.errors import SettingError

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings


def pipeline(settings: Settings, world_size: int) -> None:
    """Every stage needs a layer, and 1f1b a microbatch for each stage. Raises SettingError."""
    if settings.layers < world_size:
        raise SettingError(
            "layers",
            f"{settings.layers} layers cannot fill {world_size} pipeline stages",
            f"Give at least {world_size} layers, or start fewer ranks",
        )
    microbatches = settings.microbatches_for(world_size)
    if settings.schedule == "1f1b" and microbatches < world_size:
        raise SettingError(
            "microbatches",
            f"schedule 1f1b keeps {world_size} stages busy with as many microbatches,"
            f" there are {microbatches}",
            f"Give at least {world_size}, or choose schedule gpipe",
        )
