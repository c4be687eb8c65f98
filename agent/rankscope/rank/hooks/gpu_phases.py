"""What the phases of a step took on the GPU, from CUDA events that are used again and again.

The host runs ahead of the device, so its times say little there. At each change of phase an
event is put on the current stream, and around all that lets the stream wait for other ranks
(`stream_waits.py`); some steps later, when the device has passed them, the times between are
read. Nothing waits.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from rankscope.rank.context import Context, HookSkipped
from rankscope.rank.hooks.stream_waits import NO_GROUP, StreamWaits
from rankscope.rank.steps import EndedStep
from rankscope.wire import schema
from rankscope.wire.metric_names import GPU_SECONDS, GPU_WAIT_SECONDS

_MAX_EVENTS = 512  # of one step; one with more changes and waits is left out
_GIVE_UP_STEPS = 8
_FIRST_STEPS, _FIRST_EVERY = 64, 2  # measured at first: what a rank is later compared with
_LEAST_NS = 500_000_000  # between two steps that are measured
_BUDGET_SHARE = 0.5  # of what sampled numbers may cost
_MARK_NS = 5_000  # of CPU for one event, and for what surrounds the call
_DESCRIBE_AFTER = 16  # measured steps
_SOURCE = "pooled CUDA events, read one or more steps later"
_cpu_ns = time.thread_time_ns


class GpuPhases:
    """Time of the current CUDA stream in each phase of sampled steps, read without waiting."""

    name: ClassVar[str] = "gpu-phases"
    needs: ClassVar[str] = "torch"

    def install(self, context: Context) -> str:
        """Begin when the script has used CUDA."""
        import torch

        if torch.version.cuda is None and torch.version.hip is None:
            raise HookSkipped("this torch has no CUDA")
        self._context, self._cuda = context, torch.cuda
        self._schedule = context.schedule(self.name, 1, _BUDGET_SHARE)
        self._num_first = 0  # of the first ones
        self._read_ns = 0  # of CPU for reading since the last step that was measured
        self._why_not, self._num_same = "", 0  # waits are not known, in so many steps
        self._pool: EventPool | None = None
        self._waits = StreamWaits(context, self._mark_part)
        context.listen("backward", self._waits.backward_begins)
        context.listen("step", self._step)
        context.add_undo(self._stop)
        return _SOURCE

    def _stop(self) -> None:
        self._context.clock.on_phase = None
        self._waits.end_step()

    def _step(self, ended: EndedStep) -> None:
        if self._pool is None:
            if not self._cuda.is_initialized():
                return
            self._pool = EventPool(lambda: self._cuda.Event(enable_timing=True))
        pool, clock = self._pool, self._context.clock
        if pool.is_waiting:
            began = _cpu_ns()
            for step, values in pool.arrived(ended.step):
                self._context.record_metrics(step, values)
            self._read_ns += _cpu_ns() - began
        if clock.on_phase is not None:
            began = _cpu_ns()
            clock.on_phase = None
            self._mark(clock.phase)
            why_not = self._waits.end_step()
            num_marks = pool.close(ended.step, knows_waits=not why_not)
            self._describe(why_not)
            own_ns = _cpu_ns() - began + self._read_ns + num_marks * _MARK_NS
            self._read_ns = 0
            self._num_first += 1
            if self._num_first > _FIRST_STEPS:
                self._schedule.spent(own_ns, ended.duration_ns)
                self._schedule.spread(self._context.metrics.step_ns, _LEAST_NS)
        if self._wants(ended.step + 1) and not self._cuda.is_current_stream_capturing():
            self._mark(clock.phase)
            clock.on_phase = self._mark
            self._waits.begin_step()

    def _describe(self, why_not: str) -> None:
        """Show on the page of the rank why waits are not known, once that is so for a while."""
        is_same = why_not == self._why_not
        self._why_not, self._num_same = why_not, self._num_same + 1 if is_same else 1
        if self._num_same == _DESCRIBE_AFTER and why_not != NO_GROUP:
            source = f"{_SOURCE}; waits of the stream not known: {why_not}" if why_not else _SOURCE
            if self._context.sources.get(self.name) != source:
                self._context.sources[self.name] = source
                self._context.describe()

    def _wants(self, step: int) -> bool:
        if self._num_first <= _FIRST_STEPS:
            return step % _FIRST_EVERY == 0
        return self._schedule.wants(step)

    def _mark(self, phase: int) -> None:
        """A phase ends here; with the backward pass DDP's last wait may end."""
        assert self._pool is not None
        is_wait = self._waits.ends_with_phase()
        if not self._cuda.is_current_stream_capturing():
            self._pool.mark(phase, is_wait=is_wait)

    def _mark_part(self, is_wait: bool) -> None:
        """A part of the phase ends here, in which the stream waited for other ranks, or not."""
        assert self._pool is not None
        self._pool.mark_part(is_wait=is_wait)


@dataclass(slots=True)
class _Mark:
    """An event, and what the time before it was."""

    event: Any
    is_wait: bool
    phase: int | None  # None until the phase ends


class EventPool:
    """Events between the phases of steps, made once. `make` gives a new event."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._free: list[Any] = []
        self._open: list[_Mark] = []
        self._closed: deque[tuple[int, list[_Mark], bool]] = deque()

    @property
    def is_waiting(self) -> bool:
        """Whether a step has not been read yet."""
        return bool(self._closed)

    def mark(self, phase: int, *, is_wait: bool = False) -> None:
        """Put an event where `phase` ends; the first one of a step is its beginning."""
        for mark in reversed(self._open):
            if mark.phase is not None:
                break
            mark.phase = phase
        self._put(is_wait, phase)

    def mark_part(self, *, is_wait: bool) -> None:
        """Put an event inside a phase, which gets its name when it ends."""
        self._put(is_wait, None)

    def _put(self, is_wait: bool, phase: int | None) -> None:
        if len(self._open) <= _MAX_EVENTS:
            event = self._free.pop() if self._free else self._make()
            event.record()
            self._open.append(_Mark(event, is_wait, phase))

    def close(self, step: int, *, knows_waits: bool = False) -> int:
        """The step of the events since the last call has ended; return how many there were.

        `knows_waits`: all that the stream waited for other ranks is between two of them.
        """
        marks, self._open = self._open, []
        if 1 < len(marks) <= _MAX_EVENTS:
            self._closed.append((step, marks, knows_waits))
        return len(marks)

    def arrived(self, step: int) -> list[tuple[int, dict[str, float]]]:
        """Return (step, seconds by name of metric) of each step that the device has passed."""
        passed = []
        while self._closed:
            of_step, marks, knows_waits = self._closed[0]
            if marks[-1].event.query():
                passed.append((of_step, _seconds(marks, knows_waits)))
                self._free.extend(mark.event for mark in marks)
            elif step - of_step <= _GIVE_UP_STEPS:
                break
            self._closed.popleft()  # read, or lost: events that did not arrive are not used again
        return passed


def _seconds(marks: list[_Mark], knows_waits: bool) -> dict[str, float]:
    """Return the seconds of each phase and, if all are known, of the waits in it.

    A phase without a number of its waits had none, where any has one.
    """
    seconds: dict[str, float] = {GPU_WAIT_SECONDS["backward"]: 0.0} if knows_waits else {}
    for begin, end in itertools.pairwise(marks):
        took = begin.event.elapsed_time(end.event) / 1e3
        phase = schema.PHASES[end.phase or 0]
        names = [GPU_SECONDS[phase], GPU_WAIT_SECONDS[phase]]
        for name in names if knows_waits and end.is_wait else names[:1]:
            seconds[name] = seconds.get(name, 0.0) + took
    return seconds
