"""A gradient that was changed by one bit after the ranks had added theirs up."""

from typing import ClassVar

from rankscope_trainer.faults.bitflip import choose_parameter, flip_bit
from rankscope_trainer.faults.fault import Fault, FaultContext, Place


class BitflipGradientAfter(Fault):
    """One bit of the reduced gradient is flipped on one rank, which then differs from its peers."""

    name: ClassVar[str] = "bitflip_gradient_after"
    finding: ClassVar[str] = "replica_drift"
    place: ClassVar[Place] = Place.BEFORE_UPDATE

    def is_due(self, context: FaultContext) -> bool:
        """Only where there is a gradient to change."""
        parameter = choose_parameter(context.parts().strategy.model, context)[1]
        return parameter.grad is not None

    def fire(self, context: FaultContext) -> None:
        """Flip it; the manifest's end names tensor, index and bit."""
        name, parameter = choose_parameter(context.parts().strategy.model, context)
        assert parameter.grad is not None
        flip_bit(parameter.grad, context, of=name)
