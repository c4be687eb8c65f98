"""Metrics of steps: which steps are sampled, how values arrive, one record when a step ends.

A value that is on a GPU is copied to pinned memory without waiting and read when the copy is
done, some steps later: nothing here ever synchronises a device.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from rankscope.rank.steps import EndedStep, StepClock
from rankscope.settings import Settings
from rankscope.wire.metric_names import NONFINITE

_COARSEST = 1 << 20


class SamplingSchedule:
    """Every how many steps: a power of two, doubled while it costs more than its share of a step.

    Ranks decide alone and still sample the same steps: those of a coarser schedule are among those
    of each finer one. The first cost does not count, it holds work that is done once.
    """

    def __init__(self, every: int, budget_ratio: float) -> None:
        self.every = every
        self.budget_ratio = budget_ratio
        self._has_cost = False

    def wants(self, step: int) -> bool:
        """Return whether this step is sampled."""
        return step % self.every == 0

    def spent(self, cost_ns: int, step_ns: int) -> None:
        """Take in what it cost on one step, and how long a step is."""
        if self._has_cost and step_ns > 0:
            while cost_ns > self.budget_ratio * self.every * step_ns and self.every < _COARSEST:
                self.every *= 2
        self._has_cost = True

    def spread(self, step_ns: float, least_ns: float) -> None:
        """Sample so few steps of this length that at least `least_ns` pass between two."""
        while 0 < self.every * step_ns < least_ns and self.every < _COARSEST:
            self.every *= 2


MAX_WAITING = 64  # readings under way; more are not taken
GIVE_UP_STEPS = 8  # a copy that is not done by then is forgotten


@dataclass(slots=True)
class _Reading:
    step: int
    name: str
    host: Any  # pinned copy
    done: Any  # event behind the copy
    convert: Callable[[Any], float] | None


class AsyncReads:
    """Copies to pinned memory that the device has not finished yet. Main thread only."""

    def __init__(self) -> None:
        self._waiting: deque[_Reading] = deque()
        self._free: list[tuple[Any, Any]] = []  # pinned tensors and events to use again

    @property
    def is_waiting(self) -> bool:
        """Whether a copy is under way."""
        return bool(self._waiting)

    def add(
        self, step: int, name: str, tensor: Any, convert: Callable[[Any], float] | None = None
    ) -> None:
        """Copy a tensor on the current stream; nothing is kept of it."""
        import torch

        if len(self._waiting) >= MAX_WAITING or torch.cuda.is_current_stream_capturing():
            return
        tensor = tensor.detach()
        host, done = self._take(tensor.dtype, tensor.shape)
        host.copy_(tensor, non_blocking=True)
        done.record(torch.cuda.current_stream(tensor.device))
        self._waiting.append(_Reading(step, name, host, done, convert))

    def arrived(self, step: int) -> Iterator[tuple[int, str, float]]:
        """Yield (step, name, value) of each copy that is done; `step` is the one of now."""
        while self._waiting:
            reading = self._waiting[0]
            if reading.done.query():
                value = (reading.convert or float)(reading.host)
                self._free.append((reading.host, reading.done))
                self._waiting.popleft()
                yield reading.step, reading.name, value
            elif step - reading.step > GIVE_UP_STEPS:
                self._waiting.popleft()  # its memory may still be written: not used again
            else:
                return

    def _take(self, dtype: Any, shape: Any) -> tuple[Any, Any]:
        import torch

        for index, (host, _) in enumerate(self._free):
            if host.dtype == dtype and host.shape == shape:
                return self._free.pop(index)
        del self._free[MAX_WAITING:]
        host = torch.empty(shape, dtype=dtype, pin_memory=True)
        event: Any = torch.cuda.Event()
        return host, event


Write: TypeAlias = Callable[[int, dict[str, float]], None]  # step, values by name


class StepMetrics:
    """Collects the metrics of one step from several hooks. Main thread only."""

    def __init__(self, settings: Settings, clock: StepClock, write: Write) -> None:
        self._clock, self._write = clock, write
        self._values: dict[str, float] = {}
        self._reads = AsyncReads()
        self._schedule = SamplingSchedule(1, settings.numbers_budget_ratio / 4)
        self._least_ns = int(settings.numbers_seconds * 1e9)
        self.given: set[str] = set()  # names that the script logs itself: ours are left out
        self.step_ns = 0  # how long a step is, smoothed
        self.due = True  # the metrics of this step will be written
        self.num_parameters = 0  # that the optimizers update, once known
        self.clipped: Any = None  # norm of this step's gradients, where the script computed it

    def put(self, name: str, value: float) -> None:
        """Set a metric of the step in progress."""
        if name not in self.given:
            self._values[name] = value
            if name in NONFINITE:
                self._values[NONFINITE[name]] = float(not math.isfinite(value))

    def put_tensor(
        self, name: str, tensor: Any, convert: Callable[[Any], float] | None = None
    ) -> None:
        """Set a metric to what a small tensor on any device holds; `convert` gets it on the CPU."""
        if tensor.device.type == "cpu":
            self.put(name, (convert or float)(tensor.detach()))
        elif tensor.device.type == "cuda":
            self._reads.add(self._clock.step, name, tensor, convert)

    def step_ended(self, ended: EndedStep) -> None:
        """Write the record of this step, and what has arrived of earlier ones."""
        self.clipped = None
        if not (self.due or self._values or self._reads.is_waiting):
            self.due = self._schedule.wants(ended.step + 1)
            return
        before_ns, now_ns = self.step_ns, ended.duration_ns
        self.step_ns = int(0.8 * before_ns + 0.2 * now_ns) if before_ns else now_ns
        if self._values or self._reads.is_waiting:
            self._write_all(ended.step)
        self._schedule.spread(self.step_ns, self._least_ns)
        self.due = self._schedule.wants(ended.step + 1)

    def _write_all(self, now: int) -> None:
        """Write what has arrived of earlier steps, and the numbers of `now`, which ends."""
        began = time.thread_time_ns()
        for step, name, value in self._reads.arrived(now):
            of_now, self._values = self._values, {}
            self.put(name, value)
            self._write(step, self._values)
            self._values = of_now
        if self._values:
            self._write(now, self._values)
            self._values = {}
            self._schedule.spent(time.thread_time_ns() - began, self.step_ns)
