"""A rank that leaves without clean-up and without a word, as a C library's `exit` call does."""

import os
from typing import ClassVar

from rankscope_trainer.faults.fault import Fault, FaultContext, Place

EXIT_CODE = 3


class OsExit(Fault):
    """The rank calls `os._exit(3)` before a forward: no traceback, no clean-up."""

    name: ClassVar[str] = "os_exit"
    finding: ClassVar[str] = "crash"
    place: ClassVar[Place] = Place.BEFORE_FORWARD

    def fire(self, context: FaultContext) -> None:
        """Leave at once."""
        os._exit(EXIT_CODE)
