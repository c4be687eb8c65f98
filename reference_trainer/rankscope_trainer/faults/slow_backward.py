"""A rank whose backward alone is slow, as with recomputation that only it does."""

from typing import ClassVar

from rankscope_trainer.faults.fault import Fault, FaultContext, Magnitude, Place


class SlowBackward(Fault):
    """Each backward of the rank takes longer, the forward does not."""

    name: ClassVar[str] = "slow_backward"
    finding: ClassVar[str] = "slow_compute"
    place: ClassVar[Place] = Place.BACKWARD
    default_size: ClassVar[Magnitude | None] = Magnitude(ratio=1.0)
    size_is: ClassVar[str] = "extra time of a step"

    def fire(self, context: FaultContext) -> None:
        """Sleep inside the backward, for this microbatch's share of the extra time."""
        context.sleep(context.delay_seconds())
