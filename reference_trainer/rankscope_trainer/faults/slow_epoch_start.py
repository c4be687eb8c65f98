"""A loader that starts anew with each epoch, as without `persistent_workers`."""

from typing import ClassVar

from rankscope_trainer.faults.fault import Fault, FaultContext, Magnitude, Place


class SlowEpochStart(Fault):
    """The first batch of each epoch takes the rank longer to load."""

    name: ClassVar[str] = "slow_epoch_start"
    finding: ClassVar[str] = "slow_epoch_start"
    place: ClassVar[Place] = Place.DATA
    default_size: ClassVar[Magnitude | None] = Magnitude(seconds=1.0)
    size_is: ClassVar[str] = "extra time of an epoch"

    def is_due(self, context: FaultContext) -> bool:
        """Only while the first batch of an epoch is put together."""
        return context.parts().batches.is_at_epoch_start

    def fire(self, context: FaultContext) -> None:
        """Sleep once."""
        context.sleep(context.delay_seconds())
