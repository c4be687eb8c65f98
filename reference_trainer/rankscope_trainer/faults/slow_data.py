"""A rank whose data arrives too slowly, as from a slow disk or a busy loader."""

from typing import ClassVar

from rankscope_trainer.faults.fault import Fault, FaultContext, Magnitude, Place


class SlowData(Fault):
    """Each batch of the rank takes longer to load."""

    name: ClassVar[str] = "slow_data"
    finding: ClassVar[str] = "slow_data"
    place: ClassVar[Place] = Place.DATA
    default_size: ClassVar[Magnitude | None] = Magnitude(ratio=1.0)
    size_is: ClassVar[str] = "extra time of a step"

    def fire(self, context: FaultContext) -> None:
        """Sleep while the data loader puts the batch together."""
        context.sleep(context.delay_seconds())
