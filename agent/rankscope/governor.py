"""The governor: keeps what the agent costs the training thread below a budget.

Once in a window of steps it works out which share of the time went into recording collectives:
their number, times what one costs. Above the budget for three windows in a row it asks the source
for its next cheaper level, and in the end to stop. It never goes up again within an attempt.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar, Protocol

from rankscope.recorder import Recorder

if TYPE_CHECKING:
    from rankscope.runtime import Agent

WINDOW_STEPS = 20
WINDOW_SECONDS = 2.0  # at least: many short steps make one window
PATIENCE = 3  # windows above the budget before it acts
_now = time.monotonic_ns


class Governed(Protocol):
    """What the governor must know of a source of collectives."""

    name: ClassVar[str]
    outside_us: ClassVar[
        float
    ]  # cost of one call outside our own code, cold; measured once, see docs

    def cheaper(self) -> str:
        """Step down to the next cheaper level; return what is left out now, empty if nothing is."""


class Governor:
    """Watches one agent; called between two steps, in the main thread."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.source: Governed | None = None
        self.overhead_ratio: float | None = None  # of the last window; None: not known yet
        self._steps = 0
        self._above = 0
        self._since_ns = 0
        self._num_collectives = 0
        self._own = (0, 0)
        self._times_down = 0

    def govern(self, source: Governed) -> None:
        """Watch this source from now on, at the level that was reached before."""
        self.source = source
        self._since_ns = 0
        for _ in range(self._times_down):
            if not source.cheaper():
                self.source = None
                self._agent.stop_collectives()
                return

    def at_boundary(self) -> None:
        """Count a step; at the end of a window, decide."""
        recorder, source = self._agent.recorder, self.source
        if recorder is None or source is None:
            return
        self._steps += 1
        now = _now()
        if self._since_ns == 0:
            self._begin(recorder, now)
        elif self._steps >= WINDOW_STEPS and now - self._since_ns >= WINDOW_SECONDS * 1e9:
            self._decide(recorder, source, now)

    def _begin(self, recorder: Recorder, now: int) -> None:
        self._steps, self._since_ns = 0, now
        self._num_collectives, self._own = recorder.num_collectives, recorder.own_cost()

    def _decide(self, recorder: Recorder, source: Governed, now: int) -> None:
        own_ns, own_calls = recorder.own_cost()
        calls = own_calls - self._own[1]
        if calls > 0:
            each_ns = (own_ns - self._own[0]) / calls + source.outside_us * 1e3
            count = recorder.num_collectives - self._num_collectives
            self.overhead_ratio = each_ns * count / (now - self._since_ns)
            over = self.overhead_ratio > self._agent.settings.overhead_percent / 100
            self._above = self._above + 1 if over else 0
            if self._above >= PATIENCE:
                self._above = 0
                self._step_down(source, self.overhead_ratio, each_ns / 1e3)
        self._begin(recorder, now)

    def _step_down(self, source: Governed, overhead_ratio: float, each_us: float) -> None:
        agent = self._agent
        self._times_down += 1
        left_out = source.cheaper()
        if not left_out:
            self.source = None
            left_out = "collectives are not recorded any more"
            agent.stop_collectives()
        budget = agent.settings.overhead_percent
        agent.sources["collectives"] = (
            f"{source.name}: {left_out}: recording took {100 * overhead_ratio:.2g} % of the time, "
            f"the budget is {budget:g} % (RANKSCOPE_OVERHEAD_PERCENT)"
        )
        agent.event(
            "source_changed",
            {
                "from": source.name,
                "to": left_out,
                "overhead_ratio": f"{overhead_ratio:.5f}",
                "budget_ratio": f"{budget / 100:.5f}",
                "us_per_collective": f"{each_us:.1f}",
            },
        )
        agent.describe()
