"""A rank whose memory grows from step to step."""

from typing import ClassVar

from rankscope_trainer.faults.fault import Fault, FaultContext, Magnitude, Place

MIB = 1 << 20


class MemoryLeak(Fault):
    """Each step keeps so much more host memory, for ever."""

    name: ClassVar[str] = "memory_leak"
    finding: ClassVar[str] = "memory_growth"
    place: ClassVar[Place] = Place.AFTER_UPDATE
    default_size: ClassVar[Magnitude | None] = Magnitude(mib=4.0)
    size_is: ClassVar[str] = "growth in each step"

    def __init__(self) -> None:
        """Nothing is kept yet."""
        self._kept: list[bytes] = []

    def fire(self, context: FaultContext) -> None:
        """Keep memory that is really written to, or the system would not really give it."""
        self._kept.append(b"\x01" * int(context.size() * MIB))
        context.add(leaked_mib=context.size())
