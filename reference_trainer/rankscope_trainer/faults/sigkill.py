"""A rank that is killed, as by the kernel's out-of-memory killer or an impatient operator."""

import os
import signal
from typing import ClassVar

from rankscope_trainer.faults.fault import Fault, FaultContext, Place


class SigKill(Fault):
    """The rank is killed by SIGKILL before a forward."""

    name: ClassVar[str] = "sigkill"
    finding: ClassVar[str] = "crash"
    place: ClassVar[Place] = Place.BEFORE_FORWARD

    def fire(self, context: FaultContext) -> None:
        """Send the signal that no program can catch."""
        os.kill(os.getpid(), signal.SIGKILL)
