"""On which steps something is done that costs too much for every step."""

from __future__ import annotations

_COARSEST = 1 << 20


class Grid:
    """Every how many steps: a power of two, doubled while it costs more than its share of a step.

    Ranks decide alone and meet all the same: the steps of a coarser grid are among those of each
    finer one. The first cost is not judged, it holds work that is done once.
    """

    def __init__(self, every: int, budget_ratio: float) -> None:
        self.every = every
        self.budget_ratio = budget_ratio
        self._judged = False

    def wants(self, step: int) -> bool:
        """Return whether this step is on the grid."""
        return step % self.every == 0

    def spent(self, cost_ns: int, step_ns: int) -> None:
        """Take in what it cost on one step, and how long a step is."""
        if self._judged and step_ns > 0:
            while cost_ns > self.budget_ratio * self.every * step_ns and self.every < _COARSEST:
                self.every *= 2
        self._judged = True

    def spread(self, step_ns: float, least_ns: float) -> None:
        """Take so few of steps of this length that `least_ns` lie between two."""
        while 0 < self.every * step_ns < least_ns and self.every < _COARSEST:
            self.every *= 2
