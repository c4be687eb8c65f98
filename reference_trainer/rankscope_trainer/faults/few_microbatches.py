"""A pipeline that is mostly empty, because too few microbatches are in flight."""

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from rankscope_trainer.errors import SettingError
from rankscope_trainer.faults.fault import Fault, FaultContext, Magnitude, Place

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings


class FewMicrobatches(Fault):
    """The same batch is cut into fewer, larger microbatches, so that stages wait for each other."""

    name: ClassVar[str] = "few_microbatches"
    finding: ClassVar[str] = "pipeline_bubble"
    place: ClassVar[Place] = Place.START
    default_size: ClassVar[Magnitude | None] = Magnitude(count=2)
    size_is: ClassVar[str] = "microbatches of a step"
    on_all_ranks: ClassVar[bool] = True

    def check(self, settings: "Settings", world_size: int) -> None:
        """Only a pipeline has a bubble."""
        if settings.strategy != "pipeline":
            problem = f"few_microbatches has no effect on strategy {settings.strategy}"
            raise SettingError("fault", problem, "Choose strategy pipeline")

    def fire(self, context: FaultContext) -> None:
        """Change the cut, and keep the batch."""
        settings = context.settings
        assert settings is not None
        world_size = context.world_size
        before, after = settings.microbatches_for(world_size), int(context.size())
        sequences = settings.batch_size * before
        if sequences % after or after >= before:
            problem = f"{before} microbatches of {settings.batch_size} cannot become {after}"
            raise SettingError("fault", problem, "Give a size that is smaller and divides them")
        context.settings = dataclasses.replace(
            settings, microbatches=after, batch_size=sequences // after
        )
        from rankscope_trainer.strategies import STRATEGIES  # which knows the settings, and so this

        STRATEGIES[settings.strategy].check(context.settings, world_size)
