"""A rank whose interpreter stops to collect garbage."""

import gc
import time
from typing import ClassVar

from rankscope_trainer.faults.fault import Fault, FaultContext, Magnitude, Place

STEPS_BETWEEN = 3


class _Node:
    """Refers to itself, so that only the collector can free it."""

    def __init__(self) -> None:
        self.itself = self


class GcPause(Fault):
    """In every third step the rank leaves so many dead cycles behind, and collects them."""

    name: ClassVar[str] = "gc_pause"
    finding: ClassVar[str] = "garbage_collection"
    place: ClassVar[Place] = Place.FORWARD
    default_size: ClassVar[Magnitude | None] = Magnitude(count=300_000)
    size_is: ClassVar[str] = "objects collected at once"

    _last_step = -STEPS_BETWEEN

    def is_due(self, context: FaultContext) -> bool:
        """Only the first forward of every third step."""
        return context.step - self._last_step >= STEPS_BETWEEN

    def fire(self, context: FaultContext) -> None:
        """Make the garbage while the collector is off, then let it collect."""
        self._last_step = context.step
        was_enabled = gc.isenabled()
        gc.disable()
        for _ in range(int(context.size())):
            _Node()
        started = time.perf_counter()
        collected = gc.collect()
        context.add(paused_seconds=time.perf_counter() - started, collected=collected)
        if was_enabled:
            gc.enable()
