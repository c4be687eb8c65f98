"""A rank whose clock is ahead of the others'."""

from typing import TYPE_CHECKING, ClassVar

from rankscope_trainer.faults.fault import Fault, FaultContext, Magnitude, Place
from rankscope_trainer.faults.shifted_clock import ShiftedClock

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings


class ClockOffset(Fault):
    """The wall clock of the rank's process jumps ahead, and stays there."""

    name: ClassVar[str] = "clock_offset"
    finding: ClassVar[str] = "clock_offset"
    place: ClassVar[Place] = Place.STEP
    default_size: ClassVar[Magnitude | None] = Magnitude(seconds=0.2)
    size_is: ClassVar[str] = "time ahead"

    def check(self, settings: "Settings", world_size: int) -> None:
        """There must be a compiler."""
        self._clock = ShiftedClock()

    def begin(self, context: FaultContext) -> None:
        """Shift the clock."""
        self._clock.set(offset_ns=round(context.size() * 1e9))

    def end(self, context: FaultContext) -> None:
        """Set it right."""
        self._clock.set()
