"""The governor: keeps what recording collectives costs the training thread below a budget.

Once in a window of steps it works out which share of the time went into recording: the number
of collectives, times the CPU that one costs this thread. Where that is above the budget this rank
asks for more thinning, and for less where there is room. What is asked for takes effect when the
collector or the server has agreed it for all ranks, at the same step (`control.py`); where
neither answers, on this rank alone, which still shares steps with its peers (`thinning.py`).
A server that does not keep up asks for a level for its own sake; in force is the higher of the two.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

from rankscope.files import ring
from rankscope.rank.context import Context, Governed
from rankscope.rank.recorder import MEASURE_EVERY, Recorder
from rankscope.wire import thinning
from rankscope.wire.schema import THINNING_CHANGED

WINDOW_STEPS = 20
WINDOW_SECONDS = 2.0  # at least: many short steps make one window
PATIENCE = 3  # windows behind a decision: one may hold a garbage collection or a page fault
MEMORY = 5  # windows whose median counts
SURE = 0.8  # share of the budget that a level must stay below: one window is not the next
ROOM = 0.6  # share of the budget that a lower level must stay below, to come back to it
MAX_PATIENCE = 320  # windows: at least 11 minutes
_GUESSED_SWITCH_US = 300.0  # of kernels that go out of the dispatcher and come in again
_GUESSED_SHARE = 0.25  # of our own part, in thinned steps, until it has been measured
ALONE_AFTER_SECONDS = 12.0  # an agreement takes 2 to 4 s, over a server up to 8
_now = time.monotonic_ns


class Governor:
    """Watches one rank; called between two steps, in the main thread."""

    def __init__(self, context: Context) -> None:
        self._context = context
        # whether all ranks have agreed on a level whose step is still to come
        self.is_agreed: Callable[[], bool] = lambda: False
        self.source: Governed | None = None
        self.level = 0  # in force: the higher one of the next two
        self.own = 0  # agreed to keep the budget
        self.servers = 0  # of a server that does not keep up
        self._servers_why = ""
        self._is_servers = False  # it is in force for the server's sake
        self.wanted = 0
        self.overhead_ratio: float | None = None  # of late; None: not known yet
        self._calls_per_step = 1.0
        self._wanted_since_ns = 0
        self._is_alone = False  # the level in force was not agreed with the other ranks
        self._is_warm = False  # the first window is over: start-up does not count
        self._expected_ratio: Callable[[int], float] = lambda level: 0.0
        self._left = 0  # own level before this one
        self._windows_with_room = 0
        self._patience_to_return = MEMORY  # windows with room; doubled after each early return
        self._begin_windows()

    def _begin_windows(self) -> None:
        self._steps = 0
        self._since_ns = 0
        self._counts = (0, 0, 0, 0, 0, 0, 0)
        self._per_second: deque[float] = deque(maxlen=MEMORY)
        self._whole_us: deque[float] = deque(maxlen=MEMORY)
        self._thinned_us: deque[float] = deque(maxlen=MEMORY)
        self._switch_us: deque[float] = deque(maxlen=MEMORY)

    def govern(self, source: Governed) -> None:
        """Watch this source from now on, at the level that is in force."""
        self.source = source
        source.set_call_sites(self.level == 0)
        self._begin_windows()

    def at_boundary(self, now: int) -> None:
        """Count a step; at the end of a window, decide. `now` is of the monotonic clock, in ns."""
        recorder, source = self._context.recorder, self.source
        if recorder is None or source is None:
            return
        self._steps += 1
        if self._since_ns == 0:
            self._begin(recorder, now)
        elif self._steps >= WINDOW_STEPS and now - self._since_ns >= WINDOW_SECONDS * 1e9:
            self._end_window(recorder, source, now)
            self._begin(recorder, now)

    def take(self, level: int, *, is_alone: bool) -> None:
        """Put a level in force for the budget, from the step in progress on; between two steps."""
        self._is_alone = is_alone
        self._wanted_since_ns = _now()
        level = max(0, min(level, thinning.MAX_LEVEL))
        if level != self.own:
            self.own, self._left = level, self.own
            self._windows_with_room = 0
            self._put_in_force()

    def take_for_server(self, level: int, why: str) -> None:
        """Put the level of a server that does not keep up in force, likewise."""
        self.servers, self._servers_why = max(0, min(level, thinning.MAX_LEVEL)), why
        if self._context.recorder is not None:
            self._context.recorder.buffer[ring.THINNING_ASKED_AT] = self.servers
        self._put_in_force()

    def _put_in_force(self) -> None:
        context, source, before = self._context, self.source, self.level
        level, was_servers = max(self.own, self.servers), self._is_servers
        self._is_servers = self.servers > self.own
        if (level, self._is_servers) == (before, was_servers) or context.recorder is None:
            return
        if source is not None:
            is_over = was_servers and not self._is_servers and level < before
            self._report(context.recorder, source, level, "; server in time again" * is_over)
            source.set_call_sites(level == 0)
        self.level = level
        context.recorder.thin(level)
        context.describe()
        if (before == 0) != (level == 0):
            self._whole_us.clear()  # with call sites it is another figure
        if max(before, level) > thinning.NO_CALL_SITES:
            self._switch_us.clear()
        self._per_second.clear()  # decide anew only after some windows

    # --- windows -------------------------------------------------------------------------

    def _begin(self, recorder: Recorder, now: int) -> None:
        self._steps, self._since_ns = 0, now
        self._counts = self._read(recorder)

    @staticmethod
    def _read(recorder: Recorder) -> tuple[int, int, int, int, int, int, int]:
        costs = recorder.costs
        return (
            recorder.num_collectives, *costs.of_calls(), *costs.of_calls(thinned=True),
            recorder.num_outside, costs.of_switches()[0],
        )  # fmt: skip

    def _end_window(self, recorder: Recorder, source: Governed, now: int) -> None:
        counts = self._read(recorder)
        calls, whole_ns, whole_calls, thinned_ns, thinned_calls, num_outside, switch_ns = (
            new - old for new, old in zip(counts, self._counts, strict=True)
        )
        if not self._is_warm:
            self._is_warm = True
            return
        self._per_second.append(calls / (now - self._since_ns) * 1e9)
        if whole_calls:
            self._whole_us.append(whole_ns / whole_calls / 1e3 + source.outside_us)
            self._switch_us.append(switch_ns / 1e3 / (MEASURE_EVERY * whole_calls))
            self._calls_per_step = calls / self._steps
        if thinned_calls or num_outside:  # those that the source did not see cost nothing
            seen_us = thinned_ns / 1e3 + thinned_calls * source.outside_us
            num_seen = MEASURE_EVERY * thinned_calls
            self._thinned_us.append(seen_us * MEASURE_EVERY / (num_seen + num_outside))
        if len(self._per_second) >= PATIENCE and self._whole_us:
            self._decide(source, now)

    def _decide(self, source: Governed, now: int) -> None:
        per_second = statistics.median(self._per_second)
        whole_us = statistics.median(self._whole_us)
        if self.level == 0:
            whole_us *= thinning.call_us(1, 1, 0) / thinning.call_us(0, 1, 0)
        thinned_us, switch_us = self._thinned_cost(source, whole_us)
        budget = self._context.settings.overhead_percent / 100

        def cost_us(level: int) -> float:
            return thinning.call_us(level, whole_us, thinned_us, switch_us)

        def ratio(level: int) -> float:
            return cost_us(level) * 1e-6 * per_second

        self.overhead_ratio = ratio(self.level)
        self._expected_ratio = ratio
        fits = budget / (1e-6 * per_second) if per_second else float("inf")
        level = thinning.lowest(lambda us: us <= SURE * fits, cost_us)
        if level < self.own:  # only where room is likely to stay, and has lasted
            level = thinning.lowest(lambda us: us <= ROOM * fits, cost_us)
            level = self._lower(level)
        elif level > self.own and self.own < self._left:  # it came back too early
            self._patience_to_return = min(2 * self._patience_to_return, MAX_PATIENCE)
        self._want(level, now)

    def _thinned_cost(self, source: Governed, whole_us: float) -> tuple[float, float]:
        """Return what a call of a thinned step costs, and what whole steps cost for being few."""
        outside, outside_us = self._context.outside, source.outside_us
        can_leave = outside is not None and not outside.stays
        switch_us = statistics.median(self._switch_us) if self._switch_us else 0.0
        if can_leave and self.level <= thinning.NO_CALL_SITES:  # not measured yet
            return 0.0, _GUESSED_SWITCH_US / max(1.0, self._calls_per_step)
        if self._thinned_us:
            return min(statistics.median(self._thinned_us), whole_us), switch_us
        guessed_us = outside_us + _GUESSED_SHARE * (whole_us - outside_us)
        return 0.0 if can_leave else guessed_us, switch_us

    def _lower(self, level: int) -> int:
        self._windows_with_room = self._windows_with_room + 1 if level < self.own else 0
        return level if self._windows_with_room >= self._patience_to_return else self.own

    def _want(self, level: int, now: int) -> None:
        recorder = self._context.recorder
        assert recorder is not None
        if level != self.wanted:
            if not min(level, self.wanted) > self.own:  # else it has wanted more for longer
                self._wanted_since_ns = now
            self.wanted = level
            recorder.buffer[ring.THINNING_WANTED_AT] = level
        waited = now - self._wanted_since_ns > ALONE_AFTER_SECONDS * 1e9
        may_alone = level > self.own or self._is_alone  # lower: perhaps a peer needs it
        if level != self.own and may_alone and waited and not self.is_agreed():
            self.take(level, is_alone=True)

    def _report(self, recorder: Recorder, source: Governed, level: int, news: str) -> None:
        context = self._context
        ratio, budget = self.overhead_ratio or 0.0, context.settings.overhead_percent / 100
        agreed = "agreed for all ranks"
        if self._is_alone and not self._is_servers:
            agreed = "this rank alone: neither collector nor server answered"
        # equal on all ranks, so that pages can group them: figures are in the event
        floor = f"; it stays above that with {source.name}" * (self._expected_ratio(level) > budget)
        if floor and context.outside is not None and context.outside.stays:
            floor += f", whose kernels stay in: {context.outside.stays}"
        why = (
            f"as the server did not keep up ({self._servers_why})"
            if self._is_servers
            else f"to keep recording below {100 * budget:g} % of the training thread "
            f"(RANKSCOPE_OVERHEAD_PERCENT){floor}"
        )
        context.sources["collectives"] = (
            f"{source.name}: {thinning.words(level)}, since step {recorder.step} ({agreed}), {why}"
        )
        calls = statistics.median(self._whole_us) if self._whole_us else 0.0
        context.event(
            THINNING_CHANGED,
            {
                "source": source.name,
                "from_level": str(self.level),
                "level": str(level),
                "every": str(thinning.every(level)),
                "from_step": str(recorder.step),
                "overhead_ratio": f"{ratio:.5f}",
                "budget_ratio": f"{budget:.5f}",
                "us_per_collective": f"{calls:.1f}",
                "why": agreed + news,
                "servers_why": self._servers_why if self._is_servers else "",
            },
        )
