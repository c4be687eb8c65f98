"""A rank that dies in native code, as from a broken kernel or a wrong pointer in an extension."""

import ctypes
from typing import ClassVar

from rankscope_trainer.faults.fault import Fault, FaultContext, Place


class Segfault(Fault):
    """The rank reads memory at address 0 before a forward and dies of SIGSEGV."""

    name: ClassVar[str] = "segfault"
    finding: ClassVar[str] = "crash"
    place: ClassVar[Place] = Place.BEFORE_FORWARD

    def fire(self, context: FaultContext) -> None:
        """Read where nothing is."""
        ctypes.string_at(0)
