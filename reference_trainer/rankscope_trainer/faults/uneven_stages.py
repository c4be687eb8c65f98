"""A pipeline whose first stage has more to do than the others."""

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from rankscope_trainer.errors import SettingError
from rankscope_trainer.faults.fault import Fault, FaultContext, Magnitude, Place

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings

STRATEGIES_WITH_STAGES = ("pipeline", "model_parallel")


class UnevenStages(Fault):
    """The first stage holds so many layers more than the others, which wait for it."""

    name: ClassVar[str] = "uneven_stages"
    finding: ClassVar[str] = "stage_imbalance"
    place: ClassVar[Place] = Place.START
    default_size: ClassVar[Magnitude | None] = Magnitude(count=2)
    size_is: ClassVar[str] = "layers taken from others"
    on_all_ranks: ClassVar[bool] = True

    def check(self, settings: "Settings", world_size: int) -> None:
        """Only some strategies have stages."""
        if settings.strategy not in STRATEGIES_WITH_STAGES:
            problem = f"uneven_stages has no effect on strategy {settings.strategy}"
            remedy = f"Choose one of: {', '.join(STRATEGIES_WITH_STAGES)}"
            raise SettingError("fault", problem, remedy)

    def fire(self, context: FaultContext) -> None:
        """Take layers away from the stages that have most, until the first has so many more."""
        settings = context.settings
        assert settings is not None
        stages = context.world_size * (settings.virtual_stages if _has_several(settings) else 1)
        even, rest = divmod(settings.layers, stages)
        sizes = [even + (stage < rest) for stage in range(stages)]
        for _ in range(int(context.size())):
            giver = max(range(1, stages), key=sizes.__getitem__, default=0)
            if sizes[giver] < 2:
                problem = f"{settings.layers} layers on {stages} stages cannot be that uneven"
                raise SettingError("fault", problem, "Give more layers, or a smaller size")
            sizes[giver] -= 1
            sizes[0] += 1
        split = ",".join(map(str, sizes))
        context.tell(stage_layers=split)
        context.settings = dataclasses.replace(settings, stage_layers=split)


def _has_several(settings: "Settings") -> bool:
    return settings.strategy == "pipeline" and settings.schedule not in ("gpipe", "1f1b")
