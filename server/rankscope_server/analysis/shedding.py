"""Which ranks should send less while this server does not keep up, and how much less.

Ranks leave out single collectives of most steps, never the steps themselves (`rankscope.wire.
thinning`), so that what is summed of steps stays complete. More is asked for level by level while
the delay lasts, and taken back level by level after a good while without one; a level that was
taken back too early is taken back later the next time. Only runs that send much are asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from rankscope.wire.thinning import NO_CALL_SITES, every

FIRST_LEVEL = NO_CALL_SITES + 1  # call sites are a few bits of each collective: no relief


@dataclass(frozen=True, slots=True)
class Limits:
    """When more and when less is asked for, each with its reason."""

    # What waits to be stored: ten windows of a collector. A second or two is usual.
    behind_seconds: float = 10.0
    # What is stored and waits for a look: looks are rarer first, up to 10 s apart and as long again
    # under way. Less than this is none.
    lag_seconds: float = 20.0
    # One slow commit, a long look, what waited for a server that was away: they pass by themselves.
    sustained_seconds: float = 10.0
    # A level is in force some 8 s after it was asked for, and what waited until then comes before
    # what is thinned: the delay is added. Not all of a long one, in which more would pile up: one
    # level too many costs some minutes of detail, and a delay that falls asks for no more.
    effect_seconds: float = 30.0
    most_late_seconds: float = 30.0
    # As `loop.BEHIND_SECONDS`: below it nothing is said to be behind.
    in_time_seconds: float = 3.0
    # Long against the pause above, so that the load of one level is known before the next.
    calm_seconds: float = 120.0
    # A load that comes back as soon as it may: it is tried every half hour.
    most_calm_seconds: float = 1_920.0
    # One step in 32: what is left of the collectives is 3 %, less of it gives no more relief.
    highest_level: int = 6
    # Of the collectives of all runs: a run below it would not be felt, whatever it left out.
    least_share: float = 0.05
    # Of what the run that sends most sends now: all from here on have a part in it.
    noisy_share: float = 0.5


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Load:
    """What the ranks of a run make, and what they leave out."""

    calls_per_second: float = 0.0  # collectives, those of thinned steps with them
    level: int = 0  # in force, for the budget or for a server
    asked: int = 0  # by a server, in force or not

    @property
    def sent_per_second(self) -> float:
        """Return how many single collectives are sent."""
        return self.calls_per_second / every(self.level)


@dataclass(frozen=True, slots=True)
class Wish:
    """What a server needs of a run for its own sake."""

    level: int
    behind_seconds: float = 0.0  # when more thinning was asked for last; 0: not known


class Shedding:
    """The levels that this server needs. `turn` by one thread; read from any."""

    def __init__(
        self, limits: Limits = LIMITS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits, self._clock = limits, clock
        self._wishes: dict[str, Wish] = {}
        self._behind: tuple[float, float] | None = None  # since when, and by how much then
        self._in_time_since: float | None = None
        self._wait_until = float("-inf")  # for what was asked to be felt
        self._calm_seconds = limits.calm_seconds
        self._lowered: float | None = None  # when less was asked for last
        self._changed = float("-inf")

    def wish(self, run_id: str) -> Wish | None:
        """Return what a run should leave out for this server's sake; None: not known yet."""
        return self._wishes.get(run_id)

    @property
    def highest(self) -> int:
        """Return the highest level that any run is asked for."""
        return max((wish.level for wish in self._wishes.values()), default=0)

    def turn(self, delay_seconds: float, lag_seconds: float, loads: Mapping[str, Load]) -> None:
        """Decide anew; `loads` are those of all runs that this server looks at.

        `delay_seconds` is that of what is not stored yet, `lag_seconds` that of the analysis.
        """
        now = self._clock()
        if lag_seconds > self._limits.lag_seconds:
            delay_seconds = max(delay_seconds, lag_seconds)
        # What another process, or an earlier one, has asked for goes on from there.
        known = self._wishes
        self._wishes = {run: known.get(run) or Wish(load.asked) for run, load in loads.items()}
        self._note(now, delay_seconds)
        if self._behind is not None:
            is_due = now >= self._wait_until
            if is_due and now - self._behind[0] >= self._limits.sustained_seconds:
                self._ask_for_less(now, delay_seconds, loads)
        elif self._in_time_since is not None and self.highest:
            if now - max(self._in_time_since, self._changed) >= self._calm_seconds:
                self._ask_for_more(now)

    def _note(self, now: float, delay_seconds: float) -> None:
        """Remember since when it is behind, or in time. A delay that falls begins anew."""
        if delay_seconds <= self._limits.behind_seconds:
            self._behind = None
        elif self._behind is None or delay_seconds < self._behind[1]:
            self._behind = (now, delay_seconds)
        if delay_seconds > self._limits.in_time_seconds:
            self._in_time_since = None
        elif self._in_time_since is None:
            self._in_time_since = now

    def _ask_for_less(self, now: float, delay_seconds: float, loads: Mapping[str, Load]) -> None:
        """Ask the runs that send most to send half of it."""
        limits = self._limits
        total = sum(load.calls_per_second for load in loads.values())
        most = max((load.sent_per_second for load in loads.values()), default=0.0)
        asked = {}
        for run, load in loads.items():
            level = max(FIRST_LEVEL, 1 + max(load.level, self._wishes[run].level))
            is_noisy = (
                load.sent_per_second > 0
                and load.sent_per_second >= limits.noisy_share * most
                and load.calls_per_second >= limits.least_share * total
            )
            if is_noisy and level <= limits.highest_level:
                asked[run] = Wish(level, delay_seconds)
        if not asked:
            return
        self._wishes = self._wishes | asked
        late_seconds = min(delay_seconds, limits.most_late_seconds)
        self._wait_until = now + limits.effect_seconds + late_seconds
        if self._lowered is not None:
            came_back = now - self._lowered < 2 * self._calm_seconds
            doubled = min(2 * self._calm_seconds, limits.most_calm_seconds)
            self._calm_seconds = doubled if came_back else limits.calm_seconds
        self._lowered, self._changed = None, now

    def _ask_for_more(self, now: float) -> None:
        """Let the runs that leave out most leave out less: they were asked for it last."""
        highest = self.highest
        lower = highest - 1 if highest > FIRST_LEVEL else 0
        self._wishes = {
            run: replace(wish, level=lower) if wish.level == highest else wish
            for run, wish in self._wishes.items()
        }
        self._lowered = self._changed = now
