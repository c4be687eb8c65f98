"""What the Flight Recorder said of slots that are not sent yet: ends, and times on the device."""

from __future__ import annotations

from typing import Any

import numpy as np

from rankscope.wire import schema

# times are monotonic ns; ended_ns 0: it ended, at an unknown time; device_ns -1: not known
END = np.dtype(
    [("number", "<i8"), ("started_ns", "<i8"), ("ended_ns", "<i8"), ("device_ns", "<i8")]
)
_BY_FLIGHT_RECORDER = schema.ENDED_BY.index("flight recorder")


class Ends:
    """Ends by slot number, merged into slots as they are read."""

    def __init__(self) -> None:
        self.held: list[int] = []  # groups whose slots wait a while for an end
        self.in_flight = np.empty(0, np.int64)  # slots that were not done at the last answer
        self._rows = np.empty(0, END)

    def add(self, rows: Any, oldest: int) -> None:
        """Add ends, newer ones for the same slot instead of older; forget slots below `oldest`."""
        if len(rows) == 0:
            return
        both = np.concatenate((rows, self._rows[self._rows["number"] >= oldest]))
        self._rows = both[np.unique(both["number"], return_index=True)[1]]

    def apply(self, slots: Any, numbers: Any) -> None:
        """Give an end to the slots that have none from a better source."""
        self._fill(slots, numbers, with_time=True)

    def finish(self, slots: Any, numbers: Any) -> None:
        """Mark slots that go out now as ended, where only that is known."""
        self._fill(slots, numbers, with_time=False)

    def device_ns(self, numbers: Any) -> Any:
        """Return how long the device was at work for each slot, -1 where that is not known."""
        if len(self._rows) == 0:
            return np.full(len(numbers), -1)
        found, places = self._find(numbers)
        return np.where(found, self._rows["device_ns"][places], -1)

    def _fill(self, slots: Any, numbers: Any, *, with_time: bool) -> None:
        found, places = self._find(numbers)
        if not found.any():
            return
        rows = self._rows[places]
        fill = (
            found
            & (slots["state"] < schema.ENDED)
            & (slots["arrived_ns"].astype(np.int64) > 0)
            & ((rows["ended_ns"] > 0) == with_time)
        )
        slots["state"][fill] = schema.ENDED
        slots["ended_by"][fill] = _BY_FLIGHT_RECORDER
        if with_time:
            slots["ended_ns"][fill] = rows["ended_ns"][fill]
            slots["started_ns"][fill] = rows["started_ns"][fill]
            slots["flags"][fill] |= schema.FLAG_END_IS_UPPER_BOUND

    def _find(self, numbers: Any) -> tuple[Any, Any]:
        if len(self._rows) == 0:
            return np.zeros(len(numbers), bool), np.zeros(len(numbers), np.int64)
        known = self._rows["number"]
        places = np.minimum(np.searchsorted(known, numbers), len(known) - 1)
        return known[places] == numbers, places
