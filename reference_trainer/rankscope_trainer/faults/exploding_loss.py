"""A rank whose training blows up."""

from typing import ClassVar

from rankscope_trainer.faults.fault import Fault, FaultContext, Magnitude, Place


class ExplodingLoss(Fault):
    """The rank's learning rate is so many times too high, and its loss explodes."""

    name: ClassVar[str] = "exploding_loss"
    finding: ClassVar[str] = "divergence"
    place: ClassVar[Place] = Place.BEFORE_UPDATE
    default_size: ClassVar[Magnitude | None] = Magnitude(count=1000.0)
    size_is: ClassVar[str] = "times the learning rate"

    def fire(self, context: FaultContext) -> None:
        """Scale the rate for this update only: AdamW would not notice a scaled loss."""
        strategy, factor = context.parts().strategy, context.size()
        original = strategy.update
        groups = strategy.optimizer.param_groups

        def update() -> None:
            vars(strategy).pop("update", None)
            rates = [group["lr"] for group in groups]
            for group in groups:
                group["lr"] *= factor
            original()
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

        strategy.update = update  # type: ignore[method-assign]
