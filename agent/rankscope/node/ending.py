"""When the collector ends: it outlives the ranks, but not for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

LINGER_SECONDS = 3.0  # ranks of a restarted worker group appear within that
AFTER_FINISHED_SECONDS = 0.4
GIVE_UP_SECONDS = 60.0  # without a server, or without any rank


class LauncherView(Protocol):
    """What is to be known of the launchers; see `launchers.Launchers`."""

    def any_lives(self) -> bool:
        """Return whether some launcher has its command still running."""

    def all_finished(self) -> bool:
        """Return whether there was a launcher, and none has anything left to do."""


class EndRules:
    """Decides about the end from the launchers and from what is left to do."""

    def __init__(
        self, launchers: LauncherView, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._launchers = launchers
        self._clock = clock
        self._begun = clock()
        self._finished_at: float | None = None

    def look(self) -> None:
        """Look whether the launchers have finished; to be called before the turn that drains."""
        if not self._launchers.all_finished():
            self._finished_at = None  # or a new one has begun
        elif self._finished_at is None:
            self._finished_at = self._clock()

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
        if self._launchers.any_lives():
            return False
        quiet = now - max(last_ended, self._begun)
        if num_ended and is_drained:
            return quiet > LINGER_SECONDS
        return quiet > GIVE_UP_SECONDS
