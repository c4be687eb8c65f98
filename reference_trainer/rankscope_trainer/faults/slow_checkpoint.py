"""A rank that writes its checkpoint to slow storage, while all wait for it."""

from typing import ClassVar

from rankscope_trainer.faults.fault import Fault, FaultContext, Magnitude, Place


class SlowCheckpoint(Fault):
    """Each checkpoint takes the rank longer to write."""

    name: ClassVar[str] = "slow_checkpoint"
    finding: ClassVar[str] = "slow_checkpoint"
    place: ClassVar[Place] = Place.CHECKPOINT
    default_size: ClassVar[Magnitude | None] = Magnitude(seconds=2.0)
    size_is: ClassVar[str] = "extra time of a write"

    def fire(self, context: FaultContext) -> None:
        """Sleep before the rank's own part is written, which the others wait for."""
        context.sleep(context.delay_seconds())
