"""The backward phase, from the one function through which every backward pass goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from rankscope.rank.guard import guarded
from rankscope.rank.hooks.base import HookSkipped
from rankscope.rank.hooks.phases.optimizer import take_compiled
from rankscope.rank.steps import BACKWARD, FORWARD, OTHER, _now

if TYPE_CHECKING:
    from rankscope.rank.runtime import Agent

_TRACED = frozenset({"FakeTensor", "FunctionalTensor"})  # a compiler tries a backward pass out


class Backward:
    """Time of the backward pass, and the part of it in which DDP waits for its last bucket."""

    name: ClassVar[str] = "backward"
    needs: ClassVar[str] = "torch.autograd"

    def install(self, agent: Agent) -> str:
        """Patch the engine's entry under the names that torch calls it by."""
        import torch.autograd
        import torch.autograd.graph as graph

        original = getattr(graph, "_engine_run_backward", None)
        if original is None:
            raise HookSkipped("torch.autograd.graph._engine_run_backward does not exist")
        agent.engine_code = original.__code__
        passes = _Passes(agent)

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

        agent.patch(graph, "_engine_run_backward", _engine_run_backward)
        agent.patch(torch.autograd, "_engine_run_backward", _engine_run_backward)
        return "the autograd engine's entry"


class _Passes:
    """Tells the clock and the listeners of backward passes of the training thread."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    @guarded
    def begin(self, roots: Any, counts: bool) -> int | None:
        """A pass begins at `roots`; return the phase before, None for one that is not ours."""
        agent, clock = self._agent, self._agent.clock
        if (roots and type(roots[0]).__name__ in _TRACED) or not clock.trains():
            return None
        is_outermost = clock.phase != BACKWARD
        if agent.cycle.compiled:
            take_compiled(agent)
        if is_outermost and agent.recorder is not None:
            agent.recorder.backward.begin()
        before = clock.enter(BACKWARD, counts=counts)
        if is_outermost and counts:
            moments = agent.moments
            for listener in moments.backward_due if agent.sheet.due else moments.backward:
                listener(roots)
        return before

    @guarded
    def end(self, before: int, counts: bool) -> None:
        """It ended."""
        agent, clock = self._agent, self._agent.clock
        if before == BACKWARD and not agent.cycle.in_backward:
            return
        if agent.recorder is not None:
            clock.add_blocked(agent.recorder.backward.end(_now()))
        clock.enter(OTHER if counts and before == FORWARD else before)
        if not counts or before not in (FORWARD, OTHER):
            return
        if agent.cycle.in_backward:  # the gradients were used up as they came
            agent.cycle.in_backward = False
            clock.optimizers_ended()
            agent.step_boundary()
        elif clock.backward_ended():
            agent.first_work()
            clock.end_step()
            agent.step_boundary()

    @guarded
    def failed(self, error: BaseException) -> None:
        """An exception leaves it."""
        for listener in self._agent.moments.failure:
            listener(error)
