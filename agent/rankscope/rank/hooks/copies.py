"""Copies from host to device: the time that they hold the main thread.

Without a GPU nothing is patched and the time is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from rankscope.rank.events import listen
from rankscope.rank.guard import guarded
from rankscope.rank.hooks.base import HookSkipped
from rankscope.rank.steps import EndedStep, _now

if TYPE_CHECKING:
    from rankscope.rank.runtime import Agent


class Copies:
    """Main thread inside Tensor.to and Tensor.cuda while they copy from host to device."""

    name: ClassVar[str] = "copies"
    needs: ClassVar[str] = "torch"

    def install(self, agent: Agent) -> str:
        """Wait until the script uses CUDA; asking whether there is any would initialise it."""
        import torch

        if torch.version.cuda is None and torch.version.hip is None:
            raise HookSkipped("this torch has no CUDA")
        is_patched = False

        def step(ended: EndedStep) -> None:
            nonlocal is_patched
            if not is_patched and torch.cuda.is_initialized():
                is_patched = True
                for name in ("to", "cuda"):
                    agent.patch(torch.Tensor, name, timed(agent, getattr(torch.Tensor, name)))

        listen(agent, "step", step)
        return "Tensor.to and Tensor.cuda, from the first step on that uses CUDA"


def timed(agent: Agent, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of Tensor, timed where it moves data from the host in the main thread."""
    import torch

    clock = agent.clock
    is_compiling = torch.compiler.is_compiling

    @guarded
    def copied(result: Any, began_ns: int) -> None:
        if result.is_cuda and clock.is_ours():
            clock.copy_ns += _now() - began_ns

    def copy(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or self.is_cuda:
            return original(self, *args, **kwargs)
        began_ns = _now()
        result = original(self, *args, **kwargs)
        copied(result, began_ns)
        return result

    copy.__name__, copy.__doc__ = original.__name__, original.__doc__
    return copy
