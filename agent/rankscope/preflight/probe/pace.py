"""How late this process is: on a busy host no path can be timed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

SLEEP_S = 0.02
LEAST_SLEEPS = 5


class Pace:
    """Sleeps 20 ms again and again and notes by how much each was late."""

    def __init__(self) -> None:
        self._late_ms: list[float] = []

    async def measure(self) -> None:
        """Measure until cancelled."""
        while True:
            started = time.monotonic()
            await asyncio.sleep(SLEEP_S)
            self._late_ms.append((time.monotonic() - started - SLEEP_S) * 1e3)

    def forget(self) -> None:
        """Start anew: what came before was not while paths were measured."""
        self._late_ms.clear()

    def p90_ms(self) -> float:
        """Return the 90th percentile in ms; -1 after too few sleeps."""
        if len(self._late_ms) < LEAST_SLEEPS:
            return -1.0
        return sorted(self._late_ms)[int(len(self._late_ms) * 0.9)]


def waited_s() -> float:
    """Return for how long this process was ready to run and had no core, in s; 0 where unknown.

    The second figure of /proc/PID/schedstat (Linux, Documentation/scheduler/sched-stats.rst).
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    return 0.0
