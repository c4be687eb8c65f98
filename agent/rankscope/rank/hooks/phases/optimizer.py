"""The optimizer phase, and with it the end of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from rankscope.native import hotpath
from rankscope.rank.guard import guarded
from rankscope.rank.origins import leave_out_of_warnings
from rankscope.rank.steps import BACKWARD, FORWARD, OPTIMIZER, OTHER, StepClock

if TYPE_CHECKING:
    from rankscope.rank.runtime import Agent


class Optimizer:
    """Time of the optimizers; when those that belong together have stepped, the step ends."""

    name: ClassVar[str] = "optimizer"
    needs: ClassVar[str] = "torch.optim.optimizer"

    def install(self, agent: Agent) -> str:
        """Register torch's global optimizer hooks."""
        import torch
        import torch.optim.optimizer as module

        steps = _Steps(agent)
        original: Any = module.Optimizer.__init__
        is_compiling, cycle = torch.compiler.is_compiling, agent.cycle

        # A compiler traces these two: what they do then must not break its graph, and must not
        # make it compile again. Setting an attribute that is not read does neither.
        def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
            return None if is_compiling() else steps.before(optimizer, args, kwargs)

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            if is_compiling():
                cycle.compiled = True
            else:
                steps.after(optimizer)

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            steps.made(self)

        # torch goes through these hooks while the agent may be switched off: they stay in
        agent.undo_boundary.append(module.register_optimizer_step_pre_hook(before).remove)
        agent.undo_boundary.append(module.register_optimizer_step_post_hook(after).remove)
        agent.patch(module.Optimizer, "__init__", __init__)
        return f"global optimizer hooks; step clock {hotpath.ORIGIN}"


class _Steps:
    """Tells the clock and the listeners of optimizer steps."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    @guarded
    def made(self, optimizer: Any) -> None:
        """An optimizer was made: a step may need it too."""
        self._agent.cycle.made(optimizer)

    @guarded
    def before(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """An optimizer is about to step; return its arguments if its closure is to be timed."""
        agent, clock = self._agent, self._agent.clock
        agent.first_work()
        if clock.phase == BACKWARD:  # in one of autograd's threads, or in this one
            agent.cycle.in_backward = True
            return None
        if not clock.is_ours():
            return None
        if agent.cycle.began(optimizer):
            clock.enter(OPTIMIZER)
            moments = agent.moments
            for listener in moments.optimizer_due if agent.sheet.due else moments.optimizer:
                listener(optimizer)
            return _with_timed_closure(clock, args, kwargs)
        return None

    @guarded
    def after(self, optimizer: Any) -> None:
        """An optimizer has stepped."""
        agent, clock = self._agent, self._agent.clock
        if not clock.is_ours():
            return
        if clock.phase == BACKWARD and agent.cycle.in_backward:
            agent.cycle.num_steps += 1
            return
        is_outermost, is_complete = agent.cycle.ended(optimizer)
        if not is_outermost:
            return
        clock.enter(OTHER)
        if is_complete:
            clock.optimizers_ended()
        agent.step_boundary()


def take_compiled(agent: Agent) -> None:
    """Close the step of an optimizer that stepped inside compiled code, which times nothing."""
    agent.cycle.compiled = False
    agent.first_work()
    agent.clock.optimizers_ended()
    agent.step_boundary()


def _with_timed_closure(clock: StepClock, args: Any, kwargs: Any) -> Any:
    """Return the arguments of `step` with its closure timed: it computes forward and backward."""
    if len(args) > 1 and callable(args[1]):
        return (args[0], _timed(clock, args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, kwargs | {"closure": _timed(clock, kwargs["closure"])}
    return None


def _timed(clock: StepClock, closure: Callable[..., Any]) -> Callable[..., Any]:
    @guarded
    def enter(phase: int) -> None:
        clock.enter(phase)

    def timed_closure(*args: Any, **kwargs: Any) -> Any:
        enter(FORWARD)
        try:
            return closure(*args, **kwargs)
        finally:
            enter(OPTIMIZER)

    leave_out_of_warnings(timed_closure)
    return timed_closure
