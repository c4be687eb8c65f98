"""A part of the data that lies on a slow disk."""

from typing import ClassVar

from rankscope_trainer.faults.fault import Fault, FaultContext, Magnitude, Place

SHARDS = 8


class BadShard(Fault):
    """The first eighth of the data takes the rank longer to read, wherever it is drawn."""

    name: ClassVar[str] = "bad_shard"
    finding: ClassVar[str] = "bad_shard"
    place: ClassVar[Place] = Place.SAMPLE
    default_size: ClassVar[Magnitude | None] = Magnitude(seconds=0.02)
    size_is: ClassVar[str] = "extra time of a window"

    def is_due(self, context: FaultContext) -> bool:
        """Tell whether the window is one of the bad shard's."""
        return context.sample * SHARDS < context.parts().batches.num_windows

    def fire(self, context: FaultContext) -> None:
        """Sleep while the window is read."""
        context.add(slow_seconds=context.delay_seconds())
        context.sleep(context.delay_seconds())
