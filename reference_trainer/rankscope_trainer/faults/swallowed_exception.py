"""A script that catches an exception in the middle of a step, and goes on as if it were well."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, ClassVar

from rankscope_trainer.faults.crash import FaultInjectedError
from rankscope_trainer.faults.fault import Fault, FaultContext, Place

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("rankscope_trainer")


class SwallowedException(Fault):
    """An exception ends the rank's step early; the script logs it and goes on, out of step."""

    name: ClassVar[str] = "swallowed_exception"
    finding: ClassVar[str] = "desync"
    place: ClassVar[Place] = Place.BEFORE_FORWARD

    def fire(self, context: FaultContext) -> None:
        """Raise in the last forward of this step, and catch it around forward and backward.

        What should have followed never happens, above all the collectives of the backward: from
        here on this rank's n-th collective is its peers' (n+1)-th.
        """
        strategy, model = context.parts().strategy, context.parts().strategy.model
        train_batch, forward = strategy.train_batch, model.forward
        forwards_left = strategy.microbatches

        def failing(*inputs: Any) -> Any:
            nonlocal forwards_left
            forwards_left -= 1
            if forwards_left == 0:
                raise FaultInjectedError(f"rank {context.rank} cannot compute this batch")
            return forward(*inputs)

        def forgiving(batch: Any) -> Tensor | None:
            try:
                return train_batch(batch)
            except FaultInjectedError as error:
                logger.warning("step %d failed, going on: %s", context.step, error)
                return None
            finally:
                model.forward = forward
                vars(strategy).pop("train_batch", None)

        model.forward = failing
        strategy.train_batch = forgiving  # type: ignore[method-assign]
