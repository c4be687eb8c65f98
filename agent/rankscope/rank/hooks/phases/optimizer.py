"""The optimizer phase, and with it the end of a step; gradient scalers, which skip steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from rankscope.native import hotpath
from rankscope.rank.context import Context
from rankscope.rank.guard import guarded
from rankscope.rank.patches import leave_out_of_warnings
from rankscope.rank.steps import BACKWARD, FORWARD, OPTIMIZER, OTHER, StepClock
from rankscope.wire import schema


class Optimizer:
    """Time of the optimizers; when those that belong together have stepped, the step ends."""

    name: ClassVar[str] = "optimizer"
    needs: ClassVar[str] = "torch.optim.optimizer"

    def install(self, context: Context) -> str:
        """Register torch's global optimizer hooks."""
        import torch
        import torch.optim.optimizer as module

        steps = _Steps(context)
        is_compiling, cycle = torch.compiler.is_compiling, context.cycle

        # A compiler traces these two: what they do then must not break its graph, and must not
        # make it compile again. Setting an attribute that is not read does neither.
        def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
            return None if is_compiling() else steps.before(optimizer, args, kwargs)

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            if is_compiling():
                cycle.compiled = True
            else:
                steps.after(optimizer)

        # torch goes through these hooks while recording may be switched off: they stay in
        with context.within(context.lasting_scope):
            context.add_undo(module.register_optimizer_step_pre_hook(before).remove)
            context.add_undo(module.register_optimizer_step_post_hook(after).remove)
            context.on_new(module.Optimizer, context.cycle.made)
        return f"global optimizer hooks; step clock {hotpath.ORIGIN}"


class _Steps:
    """Reports optimizer steps to the clock and the listeners."""

    def __init__(self, context: Context) -> None:
        self._context = context

    @guarded
    def before(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """An optimizer is about to step; return its arguments if its closure is to be timed."""
        context, clock = self._context, self._context.clock
        context.first_work()
        if clock.phase == BACKWARD:  # in one of autograd's threads, or in this one
            context.cycle.in_backward = True
            return None
        if not clock.is_ours():
            return None
        if context.cycle.began(optimizer):
            clock.enter(OPTIMIZER)
            events = context.events
            for listener in events.optimizer_due if context.metrics.due else events.optimizer:
                listener(optimizer)
            return _with_timed_closure(clock, args, kwargs)
        return None

    @guarded
    def after(self, optimizer: Any) -> None:
        """An optimizer has stepped."""
        context, clock = self._context, self._context.clock
        if not clock.is_ours():
            return
        if clock.phase == BACKWARD and context.cycle.in_backward:
            context.cycle.num_steps += 1
            return
        is_outermost, is_complete = context.cycle.ended(optimizer)
        if not is_outermost:
            return
        clock.enter(OTHER)
        if is_complete:
            clock.optimizers_ended()
        context.step_boundary()


def take_compiled(context: Context) -> None:
    """Close the step of an optimizer that stepped inside compiled code, which times nothing."""
    context.cycle.compiled = False
    context.first_work()
    context.clock.optimizers_ended()
    context.step_boundary()


def _with_timed_closure(clock: StepClock, args: Any, kwargs: Any) -> Any:
    """Return the arguments of `step` with its closure timed: it computes forward and backward."""
    if len(args) > 1 and callable(args[1]):
        return (args[0], _TimedClosure(clock, args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, kwargs | {"closure": _TimedClosure(clock, kwargs["closure"])}
    return None


class _TimedClosure:
    """A closure of the script, timed. Its attributes are the closure's: optimizers read them."""

    __slots__ = ("_closure", "_enter")

    def __init__(self, clock: StepClock, closure: Callable[..., Any]) -> None:
        object.__setattr__(self, "_closure", closure)
        object.__setattr__(self, "_enter", guarded(clock.enter))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the closure."""
        self._enter(FORWARD)
        try:
            return self._closure(*args, **kwargs)
        finally:
            self._enter(OPTIMIZER)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._closure, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._closure, name, value)


leave_out_of_warnings(_TimedClosure.__call__)


class GradientScaler:
    """Steps whose optimizer a gradient scaler kept from stepping (torch.amp.GradScaler).

    A fused optimizer decides on the device whether it steps: such a step is not seen as skipped.
    """

    name: ClassVar[str] = "gradient-scaler"
    needs: ClassVar[str] = "torch.amp.grad_scaler"

    def install(self, context: Context) -> str:
        """Patch step, update and scale on the class."""
        from torch.amp.grad_scaler import GradScaler

        scalings = _Scalings(context)
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

        context.patch(GradScaler, "step", step)
        context.patch(GradScaler, "update", update)
        context.patch(GradScaler, "scale", scale)
        return "torch.amp.GradScaler"


class _Scalings:
    """Reports what scalers do to the clock and the listeners."""

    def __init__(self, context: Context) -> None:
        self._context = context

    @guarded
    def step_began(self, scaler: Any) -> int | None:
        """A scaler may step an optimizer now; return how many steps of optimizers there were."""
        clock = self._context.clock
        if not scaler.is_enabled() or not clock.is_ours():
            return None
        clock.enter(OPTIMIZER)
        return self._context.cycle.num_steps

    @guarded
    def step_ended(self, num_steps: int, optimizer: Any) -> None:
        """It did, or it did not: the gradients were not finite."""
        from torch.optim import Optimizer

        self._context.clock.enter(OTHER)
        if self._context.cycle.num_steps == num_steps and isinstance(optimizer, Optimizer):
            self._context.clock.skipped = True

    @guarded
    def updated(self) -> None:
        """All optimizers of this step have been asked."""
        clock = self._context.clock
        if clock.skipped and clock.is_ours():
            clock.optimizer_skipped(schema.STEP_SKIPPED)
            self._context.step_boundary()

    @guarded
    def scaled(self, outputs: Any, scaled: Any) -> None:
        """A loss was scaled; the listeners hear of the one before."""
        if outputs is not scaled and self._context.clock.is_ours():
            for listener in self._context.events.scaled:
                listener(outputs)
