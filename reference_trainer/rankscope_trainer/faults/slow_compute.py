"""A rank whose model computes too slowly, as on a throttled or shared processor."""

from typing import ClassVar

from rankscope_trainer.faults.fault import Fault, FaultContext, Magnitude, Place


class SlowCompute(Fault):
    """Each forward of the rank takes longer."""

    name: ClassVar[str] = "slow_compute"
    finding: ClassVar[str] = "slow_compute"
    place: ClassVar[Place] = Place.FORWARD
    default_size: ClassVar[Magnitude | None] = Magnitude(ratio=1.0)
    size_is: ClassVar[str] = "extra time of a step"

    def fire(self, context: FaultContext) -> None:
        """Sleep inside the forward, for this microbatch's share of the extra time."""
        context.sleep(context.delay_seconds())
