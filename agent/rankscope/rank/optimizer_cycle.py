"""Which optimizers make one step together, learnt from the order in which they step."""

from __future__ import annotations

import weakref
from typing import Any

from rankscope.rank.steps import StepClock


class OptimizerCycle:
    """A step is complete when every optimizer that takes part in it has stepped.

    At first that is every optimizer there is. One that steps again before the others came shows
    that the others take no part: from then on a step is what those do that did step. So two
    networks that train in turn make one step, and a critic that steps five times as often as its
    generator makes five. The step that this takes too long to know is counted all the same.
    """

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._begun_at = 0  # backward passes when the first of `_stepped` did
        self.num_steps = 0  # of optimizers, ever
        self.in_backward = False  # optimizers step inside this backward pass
        self.alternates = False  # networks train in turn, each on a loss of its own
        self.compiled = False  # one stepped inside compiled code, and no hook has looked yet
        self._alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self._expected: weakref.WeakSet[Any] | None = None
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()
        self._inside: list[int] = []  # ids of those that step now, outermost first
        self._only: weakref.ref[Any] | None = None  # the one that lives, if there is but one

    def made(self, optimizer: Any) -> None:
        """Take in a new optimizer."""
        self._alive.add(optimizer)
        self._only = None

    def optimizers(self) -> list[Any]:
        """Return those that have stepped, or are known to exist, and live."""
        return list(self._alive)

    def began(self, optimizer: Any) -> bool:
        """Return whether this step is no part of another optimizer's step."""
        only = self._only
        if only is None or only() is not optimizer:
            self._alive.add(optimizer)
            self._only = weakref.ref(optimizer) if len(self._alive) == 1 else None
        key = id(optimizer)
        if key in self._inside:  # its last step raised: nothing under it has ended either
            del self._inside[self._inside.index(key) :]
        self._inside.append(key)
        return len(self._inside) == 1

    def ended(self, optimizer: Any) -> tuple[bool, bool]:
        """Return whether it was an outermost step, and whether the cycle is complete with it."""
        self.num_steps += 1
        key = id(optimizer)
        if key in self._inside:
            del self._inside[self._inside.index(key) :]
        if self._only is not None and not self._inside:
            return True, True  # the usual case, in no time
        if optimizer in self._stepped and not self._inside:
            if self._expected is None and self._clock.num_backwards > self._begun_at:
                self._clock.renumber(self._clock.step + 1)  # two steps have passed, not one
            self._expected = self._stepped
            self._stepped = weakref.WeakSet()
        if not self._stepped:
            self._begun_at = self._clock.num_backwards
        elif self._clock.num_backwards > self._begun_at:
            self.alternates = True
        self._stepped.add(optimizer)
        if self._inside:
            return False, False
        if any(other not in self._stepped for other in self._expected or self._alive):
            return True, False
        self._expected, self._stepped = self._expected or self._stepped, weakref.WeakSet()
        return True, True
