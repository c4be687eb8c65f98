"""A rank whose clock runs too fast."""

from typing import TYPE_CHECKING, ClassVar

from rankscope_trainer.faults.fault import Fault, FaultContext, Magnitude, Place
from rankscope_trainer.faults.shifted_clock import ShiftedClock

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings


class ClockDrift(Fault):
    """The wall clock of the rank's process runs too fast, and is more wrong from step to step."""

    name: ClassVar[str] = "clock_drift"
    finding: ClassVar[str] = "clock_drift"
    place: ClassVar[Place] = Place.STEP
    default_size: ClassVar[Magnitude | None] = Magnitude(ppm=200.0)
    size_is: ClassVar[str] = "too fast by"

    def check(self, settings: "Settings", world_size: int) -> None:
        """There must be a compiler."""
        self._clock = ShiftedClock()

    def begin(self, context: FaultContext) -> None:
        """Let the clock run away."""
        self._clock.set(drift_ppm=context.size())

    def end(self, context: FaultContext) -> None:
        """Set it right."""
        self._clock.set()
