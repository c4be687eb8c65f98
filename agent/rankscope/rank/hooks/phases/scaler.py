"""Gradient scalers: steps that they skip, and losses before they scaled them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from rankscope.rank.guard import guarded
from rankscope.rank.steps import OPTIMIZER, OTHER
from rankscope.wire import schema

if TYPE_CHECKING:
    from rankscope.rank.runtime import Agent


class GradientScaler:
    """Steps whose optimizer a gradient scaler kept from stepping (torch.amp.GradScaler).

    A fused optimizer decides on the device whether it steps: such a step is not seen as skipped.
    """

    name: ClassVar[str] = "gradient-scaler"
    needs: ClassVar[str] = "torch.amp.grad_scaler"

    def install(self, agent: Agent) -> str:
        """Patch step, update and scale on the class."""
        from torch.amp.grad_scaler import GradScaler

        scalings = _Scalings(agent)
        original_step, original_update = GradScaler.step, GradScaler.update
        original_scale = GradScaler.scale

        def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = scalings.step_began(self)
            try:
                return original_step(self, optimizer, *args, **kwargs)
            finally:
                if before is not None:
                    scalings.step_ended(before, optimizer)

        def update(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original_update(self, *args, **kwargs)
            scalings.updated()
            return result

        def scale(self: Any, outputs: Any) -> Any:
            scaled = original_scale(self, outputs)
            scalings.scaled(outputs, scaled)
            return scaled

        agent.patch(GradScaler, "step", step)
        agent.patch(GradScaler, "update", update)
        agent.patch(GradScaler, "scale", scale)
        return "torch.amp.GradScaler"


class _Scalings:
    """Tells the clock and the listeners what scalers do."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    @guarded
    def step_began(self, scaler: Any) -> int | None:
        """A scaler may step an optimizer now; return how many steps of optimizers there were."""
        clock = self._agent.clock
        if not scaler.is_enabled() or not clock.is_ours():
            return None
        clock.enter(OPTIMIZER)
        return self._agent.cycle.num_steps

    @guarded
    def step_ended(self, num_steps: int, optimizer: Any) -> None:
        """It did, or it did not: the gradients were not finite."""
        from torch.optim import Optimizer

        self._agent.clock.enter(OTHER)
        if self._agent.cycle.num_steps == num_steps and isinstance(optimizer, Optimizer):
            self._agent.clock.skipped = True

    @guarded
    def updated(self) -> None:
        """All optimizers of this step have been asked."""
        clock = self._agent.clock
        if clock.skipped and clock.is_ours():
            clock.optimizer_skipped(schema.STEP_SKIPPED)
            self._agent.step_boundary()

    @guarded
    def scaled(self, outputs: Any, scaled: Any) -> None:
        """A loss was scaled; the listeners hear of the one before."""
        if outputs is not scaled and self._agent.clock.is_ours():
            for listener in self._agent.moments.scaled:
                listener(outputs)
