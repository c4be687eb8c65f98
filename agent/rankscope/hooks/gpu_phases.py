"""What the phases of a step took on the GPU, from CUDA events that are used again and again.

The host runs ahead of the device, so its times say little there. At each change of phase an
event is put on the current stream; some steps later, when the device has passed it, the times
between are read. Nothing waits.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar

from rankscope import schema
from rankscope.grid import Grid
from rankscope.hooks.base import HookSkipped
from rankscope.moments import listen
from rankscope.steps import EndedStep

if TYPE_CHECKING:
    from rankscope.runtime import Agent

_MAX_EVENTS = 64  # of one step; one with more changes of phase is left out
_GIVE_UP_STEPS = 8
_EVERY = 4  # steps


class GpuPhases:
    """Time of the current CUDA stream in each phase of sampled steps, read without waiting."""

    name: ClassVar[str] = "gpu-phases"
    needs: ClassVar[str] = "torch"

    def install(self, agent: Agent) -> str:
        """Begin when the script has used CUDA."""
        import torch

        if torch.version.cuda is None and torch.version.hip is None:
            raise HookSkipped("this torch has no CUDA")
        self._agent, self._cuda = agent, torch.cuda
        grid = Grid(_EVERY, agent.settings.numbers_budget_ratio / 4)
        self._grid = agent.grids.setdefault(self.name, grid)
        self._pool: EventPool | None = None
        listen(agent, "step", self._step)
        agent.undo.append(self._stop)
        return "pooled CUDA events, read one or more steps later"

    def _stop(self) -> None:
        self._agent.clock.on_phase = None

    def _step(self, ended: EndedStep) -> None:
        if self._pool is None:
            if not self._cuda.is_initialized():
                return
            self._pool = EventPool(lambda: self._cuda.Event(enable_timing=True))
        pool, clock, recorder = self._pool, self._agent.clock, self._agent.recorder
        if clock.on_phase is not None:
            clock.on_phase = None
            self._mark(clock.phase)
            pool.close(ended.step)
        for step, seconds in pool.arrived(ended.step):
            if recorder is not None:
                values = {f"gpu_{schema.PHASES[phase]}_seconds": s for phase, s in seconds.items()}
                recorder.record(schema.Metrics(**self._agent.here(), step=step, values=values))
        if self._grid.wants(ended.step + 1) and not self._cuda.is_current_stream_capturing():
            self._mark(clock.phase)
            clock.on_phase = self._mark

    def _mark(self, phase: int) -> None:
        assert self._pool is not None
        if not self._cuda.is_current_stream_capturing():
            self._pool.mark(phase)


class EventPool:
    """Events between the phases of steps, made once. `make` gives a new event."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._free: list[Any] = []
        self._open: list[tuple[int, Any]] = []  # the phase that ended, and the event at its end
        self._closed: deque[tuple[int, list[tuple[int, Any]]]] = deque()

    def mark(self, phase: int) -> None:
        """Put an event where `phase` ends; the first one of a step is its beginning."""
        if len(self._open) <= _MAX_EVENTS:
            event = self._free.pop() if self._free else self._make()
            event.record()
            self._open.append((phase, event))

    def close(self, step: int) -> None:
        """The step of the events since the last call has ended."""
        marks, self._open = self._open, []
        if 1 < len(marks) <= _MAX_EVENTS:
            self._closed.append((step, marks))

    def arrived(self, step: int) -> list[tuple[int, dict[int, float]]]:
        """Return (step, seconds by phase) of each step that the device has passed."""
        found = []
        while self._closed:
            of_step, marks = self._closed[0]
            if marks[-1][1].query():
                seconds: dict[int, float] = {}
                for (_, begin), (phase, end) in itertools.pairwise(marks):
                    seconds[phase] = seconds.get(phase, 0.0) + begin.elapsed_time(end) / 1e3
                found.append((of_step, seconds))
                self._free.extend(event for _, event in marks)
            elif step - of_step <= _GIVE_UP_STEPS:
                break
            self._closed.popleft()  # read, or lost: events that are late are not used again
        return found
