"""A rank that is well most of the time, and now and then stalls for a moment."""

import random
from typing import ClassVar

from rankscope_trainer.faults.fault import Fault, FaultContext, Magnitude, Place

SHARE_OF_STEPS = 0.2


class Hiccup(Fault):
    """One step in five, drawn at random, stalls once; the others are as fast as ever."""

    name: ClassVar[str] = "hiccup"
    finding: ClassVar[str] = "slow_compute"  # transient
    place: ClassVar[Place] = Place.FORWARD
    default_size: ClassVar[Magnitude | None] = Magnitude(ratio=5.0)
    size_is: ClassVar[str] = "time of one stall"

    _last_step = 0

    def is_due(self, context: FaultContext) -> bool:
        """Only the first forward of a drawn step; the first step of the fault is drawn always."""
        drawn = random.Random(f"{context.rank} {context.step}").random() < SHARE_OF_STEPS
        is_first_visit = context.step != self._last_step
        return is_first_visit and (drawn or not self._last_step)

    def fire(self, context: FaultContext) -> None:
        """Sleep once for all of the extra time."""
        self._last_step = context.step
        seconds = context.delay_seconds() * context.visits
        context.add(stalled_seconds=seconds)
        context.sleep(seconds)
