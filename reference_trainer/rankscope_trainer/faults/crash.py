"""A rank that fails with an exception of its own, while the others are well."""

from typing import ClassVar

from rankscope_trainer.faults.fault import Fault, FaultContext, Place


class FaultInjectedError(RuntimeError):
    """The failure that `crash` stands for; nothing else raises it."""


class Crash(Fault):
    """The rank raises an exception before a forward and dies of it."""

    name: ClassVar[str] = "crash"
    finding: ClassVar[str] = "crash"
    place: ClassVar[Place] = Place.BEFORE_FORWARD

    def fire(self, context: FaultContext) -> None:
        """Raise, as a loader does that meets a truncated record."""
        raise FaultInjectedError(
            f"rank {context.rank} cannot decode the batch of step {context.step}:"
            " record ends after 17 of 65 bytes"
        )
