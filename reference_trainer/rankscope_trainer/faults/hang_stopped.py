"""A rank that the operating system has stopped, as a debugger or a batch system does."""

import os
import signal
from typing import ClassVar

from rankscope_trainer.faults.fault import Fault, FaultContext, Place


class HangStopped(Fault):
    """The rank is stopped by SIGSTOP before a forward; SIGCONT lets it go on."""

    name: ClassVar[str] = "hang_stopped"
    finding: ClassVar[str] = "hang"
    place: ClassVar[Place] = Place.BEFORE_FORWARD

    def fire(self, context: FaultContext) -> None:
        """Stop the whole process, with all its threads."""
        os.kill(os.getpid(), signal.SIGSTOP)
