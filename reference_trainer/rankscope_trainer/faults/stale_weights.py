"""An asynchronous pipeline whose backward uses other weights than its forward did."""

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from rankscope_trainer.errors import SettingError
from rankscope_trainer.faults.fault import Fault, FaultContext, Place

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings


class StaleWeights(Fault):
    """No stage keeps the weights of microbatches in flight: backwards use newer ones."""

    name: ClassVar[str] = "stale_weights"
    finding: ClassVar[str] = "staleness"
    place: ClassVar[Place] = Place.START
    on_all_ranks: ClassVar[bool] = True

    def check(self, settings: "Settings", world_size: int) -> None:
        """Only pipedream keeps several versions of its weights."""
        if settings.strategy != "pipedream":
            problem = f"stale_weights has no effect on strategy {settings.strategy}"
            raise SettingError("fault", problem, "Choose strategy pipedream")

    def fire(self, context: FaultContext) -> None:
        """Turn weight stashing off."""
        assert context.settings is not None
        context.settings = dataclasses.replace(context.settings, weight_stashing=False)
