"""A rank that is stuck inside a C function which keeps the interpreter lock."""

import ctypes
from typing import ClassVar

from rankscope_trainer.faults.fault import Fault, FaultContext, Place


class HangGil(Fault):
    """The rank sleeps in C without giving the interpreter lock back: none of its threads runs."""

    name: ClassVar[str] = "hang_gil"
    finding: ClassVar[str] = "hang"
    place: ClassVar[Place] = Place.BEFORE_FORWARD

    def fire(self, context: FaultContext) -> None:
        """Call libc's `sleep` as an extension calls C that forgot to release the lock."""
        libc = ctypes.PyDLL(None)  # unlike CDLL it keeps the lock during a call
        while True:
            libc.sleep(3600)  # a signal ends one call early; its handler runs before the next
