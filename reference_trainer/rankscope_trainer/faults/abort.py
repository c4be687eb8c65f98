"""A rank that gives up from native code, as after a failed check in C++."""

import os
from typing import ClassVar

from rankscope_trainer.faults.fault import Fault, FaultContext, Place


class Abort(Fault):
    """The rank calls C's `abort` before a forward and dies of SIGABRT."""

    name: ClassVar[str] = "abort"
    finding: ClassVar[str] = "crash"
    place: ClassVar[Place] = Place.BEFORE_FORWARD

    def fire(self, context: FaultContext) -> None:
        """Abort."""
        os.abort()
