"""A rank whose model computes too slowly, as on a throttled or shared processor."""

from typing import ClassVar

from rankscope_trainer.faults.fault import FaultContext, Magnitude, Place


class SlowCompute:
    """Each forward of the rank takes longer; size is the extra time in a step."""

    name: ClassVar[str] = "slow_compute"
    finding: ClassVar[str] = "slow_compute"
    place: ClassVar[Place] = Place.FORWARD
    default_size: ClassVar[Magnitude | None] = Magnitude(ratio=1.0)

    def fire(self, context: FaultContext) -> None:
        """Sleep inside the forward, for this microbatch's share of the extra time."""
        context.sleep(context.delay_seconds())
