"""Makes forward, backward and the local gradient of a module places where faults may act."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rankscope_trainer.faults.fault import Place

if TYPE_CHECKING:
    from torch import Tensor


class ModulePlaces:
    """Replaces the module's `forward`, and hangs hooks on tensors that pass through it.

    Replacing `forward` itself puts the delay inside all hooks that an observer may have
    registered, in whatever order: it sees what it would see if the computation were slow. A hook
    on the output acts inside the backward of the same microbatch, whoever runs that backward.
    """

    def __init__(
        self,
        *,
        fire: Callable[..., Tensor | None],
        on_forward: Callable[[float], None],
        step: Callable[[], int],
        microbatches: Callable[[], int],
        watches_backward: bool,
        watches_gradient: bool,
    ) -> None:
        """Remember whom to tell, and what of."""
        self._fire = fire
        self._on_forward = on_forward
        self._step = step
        self._microbatches = microbatches
        self._watches_backward = watches_backward
        self._watches_gradient = watches_gradient
        self._hooked: set[int] = set()  # parameters, by id; they live as long as the module
        self._gradients = (0, 0)  # the step, and how many gradients it has seen

    def inject_into(self, module: Any) -> None:
        """Take the module's `forward` over."""
        original = module.forward

        def forward(*inputs: Any) -> Any:
            started = time.perf_counter()
            outputs = original(*inputs)
            self._on_forward(time.perf_counter() - started)
            fired = self._fire(Place.FORWARD, tensor=outputs)
            if getattr(fired, "requires_grad", False):
                self._watch(module, fired)
            return fired

        module.forward = forward

    def _watch(self, module: Any, outputs: Any) -> None:
        if self._watches_backward:
            outputs.register_hook(lambda gradient: self._fire(Place.BACKWARD, tensor=gradient))
        if self._watches_gradient:
            # Looked up in each forward: a sharding library puts other tensors in the place of the
            # parameters while it computes. The first one's gradient is the last to be complete.
            parameter = next(module.parameters(), None)
            if parameter is not None and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                parameter.register_hook(self._on_gradient)

    def _on_gradient(self, gradient: Tensor) -> Tensor | None:
        step, seen = self._gradients
        seen = seen + 1 if step == self._step() else 1
        self._gradients = (self._step(), seen)
        if seen != self._microbatches():
            return gradient
        return self._fire(Place.BEFORE_REDUCE, tensor=gradient)
