"""A rank whose model computes too slowly, as on a throttled or shared processor."""

from typing import ClassVar

from rankscope_trainer.faults.fault import Fault, FaultContext, Magnitude, Place

# A backward costs about two forwards, so a slow processor adds twice as much to it.
SHARES = {Place.FORWARD: 1 / 3, Place.BACKWARD: 2 / 3}


class SlowCompute(Fault):
    """Each forward and backward of the rank takes longer, the backward twice as much longer."""

    name: ClassVar[str] = "slow_compute"
    finding: ClassVar[str] = "slow_compute"
    place: ClassVar[Place] = Place.FORWARD
    other_place: ClassVar[Place | None] = Place.BACKWARD
    default_size: ClassVar[Magnitude | None] = Magnitude(ratio=1.0)
    size_is: ClassVar[str] = "extra time of a step"

    def fire(self, context: FaultContext) -> None:
        """Sleep for this microbatch's share of the extra time."""
        context.sleep(context.delay_seconds() * SHARES[context.place])
