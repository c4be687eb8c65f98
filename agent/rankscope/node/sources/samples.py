"""Asks the sources of a lane in turn: each in its own time, at a bounded cost, again after errors.

A source that costs more than BUDGET_RATIO of one processor is asked less often; one that fails is
asked again later and later. Its rows say how often it is asked, and its state is reported as news.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rankscope.node.sources.base import Row, Skipped
from rankscope.node.sources.files import uptime_seconds, waited_seconds
from rankscope.node.sources.machine import SampleSource

BUDGET_RATIO = 0.005  # CPU time of one source by time passed
MAX_INTERVAL_SECONDS = 60.0
MAX_RETRY_SECONDS = 600.0
STUCK_SECONDS = 30.0
OVERSLEPT_SECONDS = 2.0  # sleeps that last less too long are of the scheduler
JITTER_RATIO = 0.1  # of the interval, to both sides
MAX_ROWS = 4096  # of a source, in memory; a collector that is that late keeps the newest
_NEWEST_SHARE = 0.3  # of a sample's cost in the moving mean
_WARM_UP = 2  # first samples, which load and open what later ones have

Rows = list[dict[str, float | str]]


@dataclass
class Slot:
    """One source and its turn."""

    source: SampleSource
    base_seconds: float  # how often it is meant to be asked
    wall_ns: Callable[[], int] = time.time_ns
    cpu_ns: Callable[[], int] = time.thread_time_ns
    interval_seconds: float = 0.0
    due: float = 0.0
    cost_seconds: float = 0.0  # CPU of one sample, a moving mean
    state: str = "starting"  # or works, slowed, skipped, fails, stuck; with the reason
    is_open: bool = False
    failures: int = 0
    samples: int = 0
    rows: Rows = field(default_factory=list)
    num_dropped: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.interval_seconds = self.base_seconds

    def turn(self, now: float, stretch: float = 1.0) -> None:
        """Ask the source once, if it is due; `now` is monotonic, `stretch` of the wait after it."""
        if now < self.due:
            return
        try:
            if not self.is_open:
                self.source.open()
                self.is_open = True
            began = self.cpu_ns()
            taken = list(self.source.sample())
            self._adapt((self.cpu_ns() - began) / 1e9)
        except Skipped as error:
            self._failed(now, "skipped", str(error))
            return
        except Exception as error:  # noqa: BLE001 - guard of this thread: /proc and drivers vary
            self._failed(now, "fails", f"{type(error).__name__}: {error}")
            return
        self.failures = 0
        self.state = self._how_it_runs()
        self.due = max(self.due + stretch * self.interval_seconds, now)
        self._keep(taken)

    def take_rows(self) -> Rows:
        """Return the rows since the last call."""
        with self.lock:
            rows, self.rows = self.rows, []
        return rows

    def take_dropped(self) -> int:
        """Return how many rows were dropped since the last call for lack of a reader."""
        with self.lock:
            dropped, self.num_dropped = self.num_dropped, 0
        return dropped

    def _keep(self, taken: Sequence[Row]) -> None:
        times = {
            "time_ns": self.wall_ns(),
            "interval_ns": int(self.interval_seconds * 1e9),
        }
        with self.lock:
            self.rows += [{**times, **row} for row in taken]
            excess = max(len(self.rows) - MAX_ROWS, 0)
            del self.rows[:excess]
            self.num_dropped += excess

    def _adapt(self, cost_seconds: float) -> None:
        """Choose how often to ask, by what one sample costs."""
        self.samples += 1
        if self.samples <= _WARM_UP:
            return
        if self.samples == _WARM_UP + 1:
            self.cost_seconds = cost_seconds
        self.cost_seconds += _NEWEST_SHARE * (cost_seconds - self.cost_seconds)
        wanted = self.cost_seconds / BUDGET_RATIO
        if wanted > self.interval_seconds < MAX_INTERVAL_SECONDS:
            self.interval_seconds = min(self.interval_seconds * 2, MAX_INTERVAL_SECONDS)
        elif wanted * 4 < self.interval_seconds > self.base_seconds:  # well below: no swinging
            self.interval_seconds = max(self.interval_seconds / 2, self.base_seconds)

    def _how_it_runs(self) -> str:
        if self.interval_seconds == self.base_seconds:
            return "works"
        return (
            f"slowed: asked every {self.interval_seconds:g} s in place of {self.base_seconds:g} s, "
            f"it costs more than {BUDGET_RATIO:.1%} of a processor"
        )

    def _failed(self, now: float, state: str, reason: str) -> None:
        self.failures += 1
        self.state = f"{state}: {reason[:500]}"
        # a passing error is tried again at once, from the start after the second
        self.is_open = self.is_open and self.failures < 2 and state != "skipped"
        wait = self.base_seconds * 2.0 ** min(self.failures, 20)
        self.due = now + min(wait, MAX_RETRY_SECONDS)


class LaneThread(threading.Thread):
    """Takes the samples of the sources that share a thread; a hanging driver stops only it."""

    def __init__(self, name: str, slots: Sequence[Slot]) -> None:
        super().__init__(name=f"rankscope-{name}-samples", daemon=True)
        self.slots = slots
        self._ending = threading.Event()
        self._asked: tuple[Slot, float] | None = None  # whom, since when (monotonic)

    def run(self) -> None:
        """Sample until `stop`."""
        while not self._ending.is_set():
            # What happens at an even rate would else be met always, or never.
            stretch = random.uniform(1 - JITTER_RATIO, 1 + JITTER_RATIO)
            for slot in self.slots:
                self._asked = slot, time.monotonic()
                slot.turn(time.monotonic(), stretch)
            self._asked = None
            due = min(slot.due for slot in self.slots)
            self._sleep(max(due - time.monotonic(), 0.001))
        for slot in self.slots:
            slot.source.close()

    def stop(self, timeout_seconds: float = 1.0) -> None:
        """End soon; a thread that hangs in a driver is left."""
        self._ending.set()
        if self.is_alive():
            self.join(timeout_seconds)

    def _sleep(self, seconds: float) -> None:
        """Wait for the next turn, and let the sources know where that took far too long."""
        began, waited_before = uptime_seconds(), waited_seconds()
        self._ending.wait(seconds)
        waited = waited_seconds()
        if waited is None or waited_before is None:
            return
        late = uptime_seconds() - began - seconds - (waited - waited_before)
        if late > OVERSLEPT_SECONDS:
            for slot in self.slots:
                slot.source.overslept(late)

    def look(self) -> None:
        """Notice a source that has not answered for long; called by another thread."""
        asked = self._asked
        if asked is not None and time.monotonic() - asked[1] > STUCK_SECONDS:
            asked[0].state = f"stuck: no answer for {STUCK_SECONDS:g} s; its thread waits for it"
