"""When the collector ends: it outlives the ranks, but not for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rankscope.ring import process_start_ticks

FINISHED = "finished"  # written by the launcher when its command has ended
LAUNCHER_PID = "launcher.pid"  # "pid start-ticks" of the launcher
LINGER_SECONDS = 3.0  # ranks of a restarted worker group appear within that
AFTER_FINISHED_SECONDS = 0.4
GIVE_UP_SECONDS = 60.0  # without a server, or without any rank


class EndRules:
    """Decides about the end from the files of the node directory and what is left to do."""

    def __init__(self, node_directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = node_directory
        self._clock = clock
        self._begun = clock()
        self._finished_at: float | None = None

    def look(self) -> None:
        """Look whether the launcher has finished; to be called before the turn that drains."""
        if not (self._directory / FINISHED).exists():
            self._finished_at = None  # or has begun again
        elif self._finished_at is None:
            self._finished_at = self._clock()

    def launcher_lives(self) -> bool:
        """Return whether a launcher has this run in its hands."""
        try:
            pid, _, ticks = (self._directory / LAUNCHER_PID).read_text().partition(" ")
            return process_start_ticks(int(pid)) == int(ticks) != 0
        except (OSError, ValueError):
            return False

    def should_end(
        self, *, num_alive: int, num_ended: int, last_ended: float, is_drained: bool
    ) -> bool:
        """Return whether the collector should end now."""
        if num_alive:
            return False
        now = self._clock()
        if self._finished_at is not None:
            quiet = now - max(last_ended, self._finished_at)
            return (is_drained and quiet > AFTER_FINISHED_SECONDS) or quiet > GIVE_UP_SECONDS
        if self.launcher_lives():
            return False
        quiet = now - max(last_ended, self._begun)
        if num_ended and is_drained:
            return quiet > LINGER_SECONDS
        return quiet > GIVE_UP_SECONDS
