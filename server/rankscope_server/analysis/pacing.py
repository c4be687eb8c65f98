"""How often a detector looks at a large job: what takes long looks rarer, what is urgent never."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import thread_time

# What stops a job, or which rank slows it down, is said at once; the others build on that.
URGENT = frozenset({"straggler", "stopped-process", "hang", "desync", "root-cause", "regrouping"})
# Clocks of many hosts are compared one after the other: to wait would bring all at once. Blocks of
# steps are chosen as they become whole: later some of their calls are gone.
PACE_THEMSELVES = frozenset({"clock", "slow-link", "communication", "pipeline"})
SHARE = 0.005  # of a core that each of the others may use
LITTLE_SECONDS = 0.01  # a look that takes no longer is no reason to wait
MOST_SECONDS = 30.0


class Pacing:
    """When each detector is to look at an attempt again. Times are of the server's clock."""

    def __init__(self) -> None:
        self._due_ns: dict[str, int] = {}

    def is_due(self, detector: str, now_ns: int) -> bool:
        """Return whether a detector is to look now; it is where the clock was set back, too."""
        wait_ns = self._due_ns.get(detector, 0) - now_ns
        return not 0 < wait_ns <= MOST_SECONDS * 1e9

    @contextmanager
    def measured(self, detector: str, now_ns: int) -> Iterator[None]:
        """Measure a look of a detector, and take from that when the next one is due."""
        began = thread_time()
        yield
        took = thread_time() - began
        if detector not in URGENT | PACE_THEMSELVES and took > LITTLE_SECONDS:
            self._due_ns[detector] = now_ns + int(min(took / SHARE, MOST_SECONDS) * 1e9)
        else:
            self._due_ns.pop(detector, None)
