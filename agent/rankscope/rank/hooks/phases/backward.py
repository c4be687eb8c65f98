"""The backward phase, from the one function through which every backward pass goes."""

from __future__ import annotations

from typing import Any, ClassVar

from rankscope.rank.context import Context, HookSkipped
from rankscope.rank.guard import guarded
from rankscope.rank.hooks.phases.optimizer import take_compiled
from rankscope.rank.steps import BACKWARD, FORWARD, OTHER, _now

_TRACED = frozenset({"FakeTensor", "FunctionalTensor"})  # a compiler tries a backward pass out


class Backward:
    """Time of the backward pass, and the part of it in which DDP waits for its last bucket."""

    name: ClassVar[str] = "backward"
    needs: ClassVar[str] = "torch.autograd"

    def install(self, context: Context) -> str:
        """Patch the engine's entry under the names that torch calls it by."""
        import torch.autograd
        import torch.autograd.graph as graph

        original = getattr(graph, "_engine_run_backward", None)
        if original is None:
            raise HookSkipped("torch.autograd.graph._engine_run_backward does not exist")
        context.engine_code = original.__code__
        passes = _Passes(context)

        def _engine_run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            # autograd.grad gives gradients away, backward() adds them to the parameters
            counts = kwargs.get("accumulate_grad", True)
            before = passes.begin(t_outputs, counts)
            try:
                return original(t_outputs, *args, **kwargs)
            except BaseException as error:
                passes.failed(error)
                raise
            finally:
                if before is not None:
                    passes.end(before, counts)

        context.patch(graph, "_engine_run_backward", _engine_run_backward)
        context.patch(torch.autograd, "_engine_run_backward", _engine_run_backward)
        return "the autograd engine's entry"


class _Passes:
    """Reports backward passes of the training thread to the clock and the listeners."""

    def __init__(self, context: Context) -> None:
        self._context = context

    @guarded
    def begin(self, roots: Any, counts: bool) -> int | None:
        """A pass begins at `roots`; return the phase before, None for one that is not ours."""
        context, clock = self._context, self._context.clock
        if (roots and type(roots[0]).__name__ in _TRACED) or not clock.trains():
            return None
        is_outermost = clock.phase != BACKWARD
        if context.cycle.compiled:
            take_compiled(context)
        if is_outermost and context.recorder is not None:
            context.recorder.backward.begin()
        before = clock.enter(BACKWARD, counts=counts)
        if is_outermost and counts:
            events = context.events
            for listener in events.backward_due if context.metrics.due else events.backward:
                listener(roots)
        return before

    @guarded
    def end(self, before: int, counts: bool) -> None:
        """It ended."""
        context, clock = self._context, self._context.clock
        if before == BACKWARD and not context.cycle.in_backward:
            return
        if context.recorder is not None:
            clock.add_blocked(context.recorder.backward.end(_now()))
        clock.enter(OTHER if counts and before == FORWARD else before)
        if not counts or before not in (FORWARD, OTHER):
            return
        if context.cycle.in_backward:  # the gradients were used up as they came
            context.cycle.in_backward = False
            clock.optimizers_ended()
            context.step_boundary()
        elif clock.backward_ended():
            context.first_work()
            clock.end_step()
            context.step_boundary()

    @guarded
    def failed(self, error: BaseException) -> None:
        """An exception leaves it."""
        for listener in self._context.events.failure:
            listener(error)
