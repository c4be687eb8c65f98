"""A weight that memory or a link changed behind the program's back."""

from typing import ClassVar

from rankscope_trainer.faults.bitflip import choose_parameter, flip_bit
from rankscope_trainer.faults.fault import Fault, FaultContext, Place


class BitflipWeight(Fault):
    """One bit of one weight of the rank is flipped before a forward."""

    name: ClassVar[str] = "bitflip_weight"
    finding: ClassVar[str] = "replica_drift"
    place: ClassVar[Place] = Place.BEFORE_FORWARD

    def fire(self, context: FaultContext) -> None:
        """Flip it; the manifest's end names tensor, index and bit."""
        name, parameter = choose_parameter(context.parts().strategy.model, context)
        flip_bit(parameter, context, of=name)
