"""What holds the main thread inside a phase: the garbage collector, and copies to a device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, ClassVar

from rankscope.rank.context import Context, HookSkipped
from rankscope.rank.guard import guarded
from rankscope.rank.steps import EndedStep, _now


class GarbageCollection:
    """Time for which the garbage collector held the main thread."""

    name: ClassVar[str] = "garbage-collection"
    needs: ClassVar[str] = "gc"

    def install(self, context: Context) -> str:
        """Add a callback to gc.callbacks."""
        clock = context.clock
        began_ns = 0

        @guarded
        def collecting(phase: str, _: dict[str, Any]) -> None:
            nonlocal began_ns
            if not clock.is_ours():
                return
            if phase == "start":
                began_ns = _now()
            elif began_ns:
                clock.gc_ns += _now() - began_ns
                began_ns = 0

        gc.callbacks.append(collecting)
        context.add_undo(lambda: gc.callbacks.remove(collecting))
        return "gc.callbacks"


class Copies:
    """Main thread inside Tensor.to and Tensor.cuda while they copy from host to device.

    Without a GPU nothing is patched and the time is 0.
    """

    name: ClassVar[str] = "copies"
    needs: ClassVar[str] = "torch"

    def install(self, context: Context) -> str:
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
                    context.patch(torch.Tensor, name, timed(context, getattr(torch.Tensor, name)))

        context.listen("step", step)
        return "Tensor.to and Tensor.cuda, from the first step on that uses CUDA"


def timed(context: Context, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of Tensor, timed where it moves data from the host in the main thread."""
    import torch

    clock = context.clock
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
