"""Phases of a step without a change to the script: data, backward, optimizer, checkpoint.

Forward has no hook of its own: module hooks cost 2.5 us per module call and disturb compiled
code. It is what lies between the data loader and the backward pass; see `rankscope.steps`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from rankscope.guard import guarded
from rankscope.hooks.base import HookSkipped
from rankscope.steps import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    EVALUATION,
    FORWARD,
    OPTIMIZER,
    OTHER,
    StepClock,
    _now,
)

if TYPE_CHECKING:
    from rankscope.runtime import Agent


class DataLoading:
    """Time in which a step waits for its batch (torch.utils.data.DataLoader)."""

    name: ClassVar[str] = "data"
    needs: ClassVar[str] = "torch.utils.data.dataloader"

    def install(self, agent: Agent) -> str:
        """Patch the iterator's `__next__` on its class."""
        import torch
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        clock = agent.clock
        original = _BaseDataLoaderIter.__next__
        is_grad_enabled = torch.is_grad_enabled

        def __next__(self: Any) -> Any:
            before = enter(DATA)
            try:
                item = original(self)
            except BaseException:  # also StopIteration: no batch came, no forward follows
                if before is not None:
                    leave(OTHER)
                raise
            if before is not None:
                leave(FORWARD if is_grad_enabled() else EVALUATION)
            return item

        @guarded
        def enter(phase: int) -> int | None:
            if not clock.is_ours():
                return None
            clock.sees_data = True
            return clock.enter(phase)

        @guarded
        def leave(phase: int) -> None:
            clock.enter(phase)

        agent.patch(_BaseDataLoaderIter, "__next__", __next__)
        return "DataLoader iterators"


class Backward:
    """Time of the backward pass, and the part of it in which DDP waits for its last bucket."""

    name: ClassVar[str] = "backward"
    needs: ClassVar[str] = "torch.autograd"

    def install(self, agent: Agent) -> str:
        """Patch the one function through which every backward pass goes."""
        import torch.autograd
        import torch.autograd.graph as graph

        original = getattr(graph, "_engine_run_backward", None)
        if original is None:
            raise HookSkipped("torch.autograd.graph._engine_run_backward does not exist")
        agent.engine_code = original.__code__

        def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
            before = began()
            try:
                return original(*args, **kwargs)
            finally:
                if before is not None:
                    ended(before)

        clock = agent.clock

        @guarded
        def began() -> int | None:
            if not clock.is_ours():
                return None
            if agent.recorder is not None:
                agent.recorder.begin_backward()
            return clock.enter(BACKWARD)

        @guarded
        def ended(before: int) -> None:
            if agent.recorder is not None:
                clock.add_blocked(agent.recorder.end_backward(_now()))
            clock.enter(BACKWARD if before == BACKWARD else OTHER)

        agent.patch(graph, "_engine_run_backward", _engine_run_backward)
        agent.patch(torch.autograd, "_engine_run_backward", _engine_run_backward)
        return "the autograd engine's entry"


class Optimizer:
    """Time of the optimizer; its end after a backward pass is the end of the step."""

    name: ClassVar[str] = "optimizer"
    needs: ClassVar[str] = "torch.optim.optimizer"

    def install(self, agent: Agent) -> str:
        """Register torch's global optimizer hooks."""
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        clock = agent.clock

        @guarded
        def before(*_: Any) -> None:
            agent.first_work()
            if clock.is_ours():
                clock.enter(OPTIMIZER)

        @guarded
        def after(*_: Any) -> None:
            if clock.is_ours():
                clock.enter(OTHER)
                clock.optimizer_ended()
                agent.step_boundary()

        agent.undo.append(register_optimizer_step_pre_hook(before).remove)
        agent.undo.append(register_optimizer_step_post_hook(after).remove)
        return "global optimizer hooks"


class Checkpointing:
    """Time in torch.save, and the fact that a step saved a checkpoint."""

    name: ClassVar[str] = "checkpoint"
    needs: ClassVar[str] = "torch.serialization"

    def install(self, agent: Agent) -> str:
        """Patch torch.save, under both names that people use."""
        import torch
        import torch.serialization

        original = torch.serialization.save
        save = _in_phase(agent.clock, CHECKPOINT, original)
        agent.patch(torch.serialization, "save", save)
        if getattr(torch, "save", None) is original:
            agent.patch(torch, "save", save)
        return "torch.save"


class Pipeline:
    """Forward and backward of each microbatch of torch.distributed.pipelining, and the stage."""

    name: ClassVar[str] = "pipeline"
    needs: ClassVar[str] = "torch.distributed.pipelining.stage"

    def install(self, agent: Agent) -> str:
        """Patch the chunk methods of the stage base class, from which all stages derive."""
        import torch.distributed.pipelining.stage as module

        base: Any = module._PipelineStageBase
        clock = agent.clock
        for method, phase in (
            ("forward_one_chunk", FORWARD),
            ("backward_one_chunk", BACKWARD),
            ("backward_weight_one_chunk", BACKWARD),
        ):
            if hasattr(base, method):
                agent.patch(base, method, _in_phase(clock, phase, getattr(base, method)))
        original = base.__init__

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            made(self)

        @guarded
        def made(stage: Any) -> None:
            clock.forward_is_explicit = True
            agent.describe(stage=int(stage.stage_index), num_stages=int(stage.num_stages))

        agent.patch(base, "__init__", __init__)
        return "chunk methods of pipeline stages"


def _in_phase(clock: StepClock, phase: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `original`, timed as `phase` on the main thread. Its exceptions pass."""

    @guarded
    def enter() -> int | None:
        return clock.enter(phase) if clock.is_ours() else None

    @guarded
    def leave() -> None:
        clock.enter(OTHER)

    def timed(*args: Any, **kwargs: Any) -> Any:
        before = enter()
        try:
            return original(*args, **kwargs)
        finally:
            if before is not None:
                leave()

    timed.__name__, timed.__doc__ = original.__name__, original.__doc__
    timed.__wrapped__ = original  # type: ignore[attr-defined]
    return timed
