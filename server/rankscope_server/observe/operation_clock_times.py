"""When the newest operations of one group began and ended on each clock."""

from __future__ import annotations

import numpy as np

from rankscope.wire.arrays import begins_of_runs, first_places
from rankscope_server.findings.statistics import Array

KEPT = 192  # operations of a group: two windows, and drift between them
# Chunks of ranks come seconds apart; where operations are so frequent that those kept span less,
# every second one is left out, and again, on all ranks the same.
_MIN_SPAN_NS = 30_000_000_000
NEVER_NS = 1 << 62


class OperationClockTimes:
    """Operations x clocks; both are named by numbers of the caller's, those of operations ascend.

    Of several ends on one clock the first counts, of several starts the last.
    """

    def __init__(self, stride: int) -> None:
        self.stride = stride  # every `stride`th number is kept; a power of two
        self.numbers = np.zeros(0, np.int64)
        self._starts_ns = np.zeros((0, 0), np.int64)  # -`NEVER_NS` where a clock did not see it
        self._ends_ns = np.zeros((0, 0), np.int64)

    def put(self, numbers: Array, clocks: Array, starts_ns: Array, ends_ns: Array) -> Array:
        """Take operations as clocks saw them, arrays of one length; return which were kept."""
        self._make_rows(numbers, starts_ns)
        places = np.minimum(np.searchsorted(self.numbers, numbers), max(len(self.numbers) - 1, 0))
        kept = np.flatnonzero(self.numbers[places] == numbers)
        if not len(kept):
            return kept
        more = int(clocks[kept].max()) + 1 - self._starts_ns.shape[1]
        if more > 0:
            beside = ((0, 0), (0, more))
            self._starts_ns = np.pad(self._starts_ns, beside, constant_values=-NEVER_NS)
            self._ends_ns = np.pad(self._ends_ns, beside, constant_values=NEVER_NS)
        width = self._starts_ns.shape[1]
        cells = places[kept] * width + clocks[kept]
        order = np.argsort(cells, kind="stable")
        begins = begins_of_runs(cells[order])
        rows, columns = divmod(cells[order][begins], width)
        last_start = np.maximum.reduceat(starts_ns[kept][order], begins)
        first_end = np.minimum.reduceat(ends_ns[kept][order], begins)
        self._starts_ns[rows, columns] = np.maximum(self._starts_ns[rows, columns], last_start)
        self._ends_ns[rows, columns] = np.minimum(self._ends_ns[rows, columns], first_end)
        return kept

    def is_kept(self, numbers: Array) -> Array:
        """Return which of some operations are not left out."""
        found: Array = numbers & (self.stride - 1) == 0
        return found

    def may_hold(self, numbers: Array) -> Array:
        """Return which of some operations are not older than all that are held."""
        found: Array = numbers >= (self.numbers[0] if len(self.numbers) else 0)
        return found

    def newest(self, most: int) -> tuple[Array, Array]:
        """Return starts and ends of the newest operations, at most so many, operations x clocks.

        Of a clock that did not see one they are -`NEVER_NS` and `NEVER_NS`.
        """
        return self._starts_ns[-most:], self._ends_ns[-most:]

    def _make_rows(self, numbers: Array, starts_ns: Array) -> None:
        """Make room for new operations; leave out the oldest, or where frequent every second."""
        new, first = first_places(numbers)
        held, place = np.unique(np.append(self.numbers, new), return_index=True)
        # of those held a start that any clock saw, of the new ones that of their first event
        known_ns = np.max(self._starts_ns, axis=1, initial=-NEVER_NS)
        times_ns = np.append(known_ns, starts_ns[first])[place]
        while len(held) > 2 * KEPT:
            if abs(int(times_ns[-1] - times_ns[-KEPT])) >= _MIN_SPAN_NS:
                held, times_ns = held[-KEPT:], times_ns[-KEPT:]
            else:
                self.stride *= 2
                stays = self.is_kept(held)
                held, times_ns = held[stays], times_ns[stays]
        if np.array_equal(held, self.numbers):
            return
        shape = (len(held), self._starts_ns.shape[1])
        starts, ends = np.full(shape, -NEVER_NS), np.full(shape, NEVER_NS)
        rows = np.minimum(np.searchsorted(held, self.numbers), max(len(held) - 1, 0))
        staying = held[rows] == self.numbers
        rows = rows[staying]
        starts[rows], ends[rows] = self._starts_ns[staying], self._ends_ns[staying]
        self.numbers, self._starts_ns, self._ends_ns = held, starts, ends
