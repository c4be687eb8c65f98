"""The sheet: the numbers of the step in progress, written as one record when the step ends.

A number that lies on a GPU is copied to pinned memory without waiting and read when the copy is
done, some steps later: nothing here ever synchronises a device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rankscope.rank.async_reads import LateReader
from rankscope.rank.sampling_schedule import Grid
from rankscope.rank.steps import EndedStep
from rankscope.wire import schema
from rankscope.wire.metric_names import NONFINITE

if TYPE_CHECKING:
    from rankscope.rank.runtime import Agent


class Sheet:
    """Collects numbers of one step from several hooks. Main thread only."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._values: dict[str, float] = {}
        self._late = LateReader()
        self._grid = Grid(1, agent.settings.numbers_budget_ratio / 4)
        self._least_ns = int(agent.settings.numbers_seconds * 1e9)
        self.given: set[str] = set()  # names that the script gives itself: ours give way
        self.step_ns = 0  # how long a step is, smoothed
        self.due = True  # the numbers of this step will be written
        self.num_parameters = 0  # that the optimizers update, once known
        self.clipped: Any = None  # norm of this step's gradients, where the script computed it

    def put(self, name: str, value: float) -> None:
        """Write a number down for the step in progress."""
        if name not in self.given:
            self._values[name] = value
            if name in NONFINITE:
                self._values[NONFINITE[name]] = float(not math.isfinite(value))

    def put_tensor(
        self, name: str, tensor: Any, convert: Callable[[Any], float] | None = None
    ) -> None:
        """Write down what a small tensor on any device holds; `convert` gets it on the CPU."""
        if tensor.device.type == "cpu":
            self.put(name, (convert or float)(tensor.detach()))
        elif tensor.device.type == "cuda":
            self._late.add(self._agent.clock.step, name, tensor, convert)

    def step_ended(self, ended: EndedStep) -> None:
        """Write the record of this step, and what has arrived of earlier ones."""
        self.clipped = None
        if not (self.due or self._values or self._late.is_waiting):
            self.due = self._grid.wants(ended.step + 1)
            return
        self.step_ns = (
            ended.duration_ns if not self.step_ns
            else int(0.8 * self.step_ns + 0.2 * ended.duration_ns)
        )  # fmt: skip
        if self._values or self._late.is_waiting:
            self._write_all(ended.step)
        self._grid.spread(self.step_ns, self._least_ns)
        self.due = self._grid.wants(ended.step + 1)

    def _write_all(self, now: int) -> None:
        """Write what has arrived of earlier steps, and the numbers of `now`, which ends."""
        began = time.thread_time_ns()
        for step, name, value in self._late.arrived(now):
            own, self._values = self._values, {}
            self.put(name, value)
            self._write(step, self._values)
            self._values = own
        if self._values:
            self._write(now, self._values)
            self._values = {}
            self._grid.spent(time.thread_time_ns() - began, self.step_ns)

    def _write(self, step: int, values: dict[str, float]) -> None:
        recorder = self._agent.recorder
        if recorder is not None and values:
            recorder.record(schema.Metrics(**self._agent.here(), step=step, values=values))
