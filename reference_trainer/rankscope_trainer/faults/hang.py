"""A rank that stops without a word, as in a deadlock or on a file system that does not answer."""

from typing import ClassVar

from rankscope_trainer.faults.fault import Fault, FaultContext, Place


class Hang(Fault):
    """The rank sleeps for ever before a forward and never enters the step's next collective."""

    name: ClassVar[str] = "hang"
    finding: ClassVar[str] = "hang"
    place: ClassVar[Place] = Place.BEFORE_FORWARD

    def fire(self, context: FaultContext) -> None:
        """Sleep until a signal ends the process."""
        while True:
            context.sleep(3600.0)
