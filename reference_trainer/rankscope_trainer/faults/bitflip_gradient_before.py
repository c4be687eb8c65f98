"""A gradient that was computed wrongly, by one bit, before the ranks added theirs up."""

from typing import ClassVar

from rankscope_trainer.faults.bitflip import flip_bit
from rankscope_trainer.faults.fault import Fault, FaultContext, Place


class BitflipGradientBefore(Fault):
    """One bit of the rank's own gradient is flipped before the reduction, which spreads it."""

    name: ClassVar[str] = "bitflip_gradient_before"
    finding: ClassVar[str] = "corruption"
    place: ClassVar[Place] = Place.BEFORE_REDUCE

    def fire(self, context: FaultContext) -> None:
        """Flip it; all replicas apply the same wrong sum, so they stay equal."""
        assert context.tensor is not None
        name, _ = next(context.parts().strategy.model.named_parameters())
        changed = context.tensor.clone()
        flip_bit(changed, context, of=name)
        context.tensor = changed
