"""A rank whose forward alone is slow, as with an input that needs more work there."""

from typing import ClassVar

from rankscope_trainer.faults.fault import Fault, FaultContext, Magnitude, Place


class SlowForward(Fault):
    """Each forward of the rank takes longer, the backward does not."""

    name: ClassVar[str] = "slow_forward"
    finding: ClassVar[str] = "slow_compute"
    place: ClassVar[Place] = Place.FORWARD
    default_size: ClassVar[Magnitude | None] = Magnitude(ratio=1.0)
    size_is: ClassVar[str] = "extra time of a step"

    def fire(self, context: FaultContext) -> None:
        """Sleep inside the forward, for this microbatch's share of the extra time."""
        context.sleep(context.delay_seconds())
