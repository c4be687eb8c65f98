"""What holds the main thread inside a phase: the garbage collector, and copies to a device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import MethodType
from typing import Any, ClassVar

from rankscope.rank.context import Context, HookSkipped
from rankscope.rank.guard import guarded
from rankscope.rank.patches import leave_out_of_warnings
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
                    original = getattr(torch.Tensor, name)
                    context.patch(torch.Tensor, name, TimedMethod(context, original))

        context.listen("step", step)
        return "Tensor.to and Tensor.cuda, from the first step on that uses CUDA"


class TimedMethod:
    """A method of Tensor, timed where it moves data from the host in the main thread.

    `__torch_function__` of the script's classes and modes gets what Tensor has under this name,
    and looks for it among the methods that it knows: it is equal to the one that it replaces.
    """

    def __init__(self, context: Context, original: Callable[..., Any]) -> None:
        import torch

        self._original, self._clock = original, context.clock
        self._is_compiling = torch.compiler.is_compiling

    def __call__(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        if self._is_compiling() or tensor.is_cuda:
            return self._original(tensor, *args, **kwargs)
        began_ns = _now()
        result = self._original(tensor, *args, **kwargs)
        self._copied(result, began_ns)
        return result

    @guarded
    def _copied(self, result: Any, began_ns: int) -> None:
        if result.is_cuda and self._clock.is_ours():
            self._clock.copy_ns += _now() - began_ns

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __eq__(self, other: object) -> bool:
        return self._original == (other._original if isinstance(other, TimedMethod) else other)

    def __hash__(self) -> int:
        return hash(self._original)

    def __reduce__(self) -> Any:
        return self._original.__reduce__()


leave_out_of_warnings(TimedMethod.__call__)
