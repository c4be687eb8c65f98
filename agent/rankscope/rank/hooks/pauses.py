"""Pauses of Python's garbage collector."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any, ClassVar

from rankscope.rank.guard import guarded
from rankscope.rank.steps import _now

if TYPE_CHECKING:
    from rankscope.rank.runtime import Agent


class GarbageCollection:
    """Time for which the garbage collector held the main thread."""

    name: ClassVar[str] = "garbage-collection"
    needs: ClassVar[str] = "gc"

    def install(self, agent: Agent) -> str:
        """Add a callback to gc.callbacks."""
        clock = agent.clock
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
        agent.undo.append(lambda: gc.callbacks.remove(collecting))
        return "gc.callbacks"
