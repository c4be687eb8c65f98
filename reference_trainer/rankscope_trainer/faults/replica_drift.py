"""A replica that silently walks away from the others."""

from typing import ClassVar

from rankscope_trainer.faults.fault import Fault, FaultContext, Place


class ReplicaDrift(Fault):
    """The rank leaves the optimizer's step out, so its weights differ from those of its peers."""

    name: ClassVar[str] = "replica_drift"
    finding: ClassVar[str] = "replica_drift"
    place: ClassVar[Place] = Place.BEFORE_UPDATE

    def fire(self, context: FaultContext) -> None:
        """Forget the gradients instead of applying them, once."""
        strategy = context.parts().strategy

        def update() -> None:
            vars(strategy).pop("update", None)  # the class's own is back
            strategy.optimizer.zero_grad(set_to_none=True)

        strategy.update = update  # type: ignore[method-assign]
