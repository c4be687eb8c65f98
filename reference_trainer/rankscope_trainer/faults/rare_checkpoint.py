"""A run that would lose much if it failed, because it seldom writes a checkpoint."""

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from rankscope_trainer.errors import SettingError
from rankscope_trainer.faults.fault import Fault, FaultContext, Magnitude, Place

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings


class RareCheckpoint(Fault):
    """Checkpoints are written so many times more rarely than the settings say."""

    name: ClassVar[str] = "rare_checkpoint"
    finding: ClassVar[str] = "checkpoint_interval"
    place: ClassVar[Place] = Place.START
    default_size: ClassVar[Magnitude | None] = Magnitude(count=10)
    size_is: ClassVar[str] = "times rarer"
    on_all_ranks: ClassVar[bool] = True

    def check(self, settings: "Settings", world_size: int) -> None:
        """Only a run that writes any can write fewer."""
        if not settings.checkpoint_dir:
            problem = "rare_checkpoint has no effect on a run that writes none"
            raise SettingError("fault", problem, "Give a checkpoint_dir")

    def fire(self, context: FaultContext) -> None:
        """Make the interval longer."""
        settings = context.settings
        assert settings is not None
        every = settings.checkpoint_every * int(context.size())
        context.add(checkpoint_every=every)
        context.settings = dataclasses.replace(settings, checkpoint_every=every)
