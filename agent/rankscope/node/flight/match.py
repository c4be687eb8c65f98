"""From dumps of the Flight Recorder, one after the other, to ends of slots. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankscope.files.flight_recorder import Dump, FlightEntry
from rankscope.node.flight.ends import END
from rankscope.node.flight.lanes import (
    Lane,
    LaneKey,
    LaneSlots,
    groups_named,
    key_of,
    place,
    slots_of,
)

_MAX_MS = 1e9


@dataclass(frozen=True)
class Matched:
    """What one dump gave."""

    rows: Any  # of ends.END
    in_flight: Any  # numbers of slots that are not done yet
    unmatched: int = 0  # new entries without a slot
    overwritten: int = 0  # entries that were gone before this dump


class Matcher:
    """Goes through the dumps of one recorder of one rank; each entry is matched once."""

    def __init__(self, *, is_timed: bool = False) -> None:
        self.is_timed = is_timed
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._latest = -1  # highest record_id that was seen
        self._lanes: dict[LaneKey, Lane] = {}
        self._open: dict[int, int] = {}  # record_id -> slot number, until its end is known
        self._retired: set[int] = set()  # of those: retired, but without a duration

    def take(
        self, dump: Dump, slots: Any, groups: Mapping[int, str], clock: tuple[int, int]
    ) -> Matched:
        """Match the entries that are new, and return every end that became known.

        `slots` are whole and in order; `clock` is a (monotonic, wall) pair of the answer.
        """
        wall_ahead = clock[1] - clock[0]
        entries = sorted(dump.entries, key=lambda entry: entry.record_id)
        overwritten = self._begin(entries)
        new = [
            entry for entry in entries if entry.record_id > self._latest and not entry.ends_batch
        ]
        unmatched = self._place(new, dump, slots, groups, wall_ahead)
        if entries:
            self._latest = max(self._latest, entries[-1].record_id)
        batches = {entry.batch: entry for entry in entries if entry.ends_batch}
        rows = self._take_ends(entries, batches, wall_ahead)
        known = {entry.record_id for entry in entries}
        self._open = {key: number for key, number in self._open.items() if key in known}
        self._retired &= self._open.keys()
        in_flight = np.array(sorted(self._open.values()), np.int64)
        return Matched(rows, in_flight, unmatched, overwritten)

    def _begin(self, entries: list[FlightEntry]) -> int:
        """Return how many entries were missed; begin anew where the recorder was reset."""
        if not entries:
            return 0
        if entries[-1].record_id < self._latest:
            self._begin_anew()
        missed = entries[0].record_id - self._latest - 1
        if missed > 0 and self._latest >= 0:
            for lane in self._lanes.values():
                lane.is_anchored = False
            return missed
        return 0

    def _place(
        self,
        new: list[FlightEntry],
        dump: Dump,
        slots: Any,
        groups: Mapping[int, str],
        wall_ahead: int,
    ) -> int:
        lanes: dict[LaneKey, list[tuple[FlightEntry, int]]] = {}
        for entry in new:
            created = entry.time_created_ns - wall_ahead
            lanes.setdefault(key_of(entry, dump.pg_config), []).append((entry, created))
        unmatched = 0
        for key, entries in lanes.items():
            found: LaneSlots = slots_of(key, slots, groups_named(key.name, groups))
            lane = self._lanes.setdefault(key, Lane())
            for index, (entry, created) in enumerate(entries):
                number = place(lane, found, entries, index)
                if number is not None:
                    self._open[entry.record_id] = number
                elif found.arrived and created >= found.arrived[0]:
                    unmatched += 1
        return unmatched

    def _take_ends(
        self,
        entries: list[FlightEntry],
        batches: Mapping[tuple[int, bool, int], FlightEntry],
        wall_ahead: int,
    ) -> Any:
        rows = []
        for entry in entries:
            number = self._open.get(entry.record_id)
            if number is None:
                continue
            state_entry = batches.get(entry.batch, entry)
            if not self._has_ended(state_entry, entry.record_id):
                continue
            del self._open[entry.record_id]
            rows.append((number, *_times(state_entry, wall_ahead)))
        return np.array(rows, END)

    def _has_ended(self, state_entry: FlightEntry, record_id: int) -> bool:
        """Return whether this entry will say no more.

        The watchdog retires an entry first, and writes its duration a moment later.
        """
        if state_entry.state != "completed":
            return state_entry.retired
        if not self.is_timed or state_entry.duration_ms is not None or record_id in self._retired:
            return True
        if state_entry.retired:
            self._retired.add(record_id)
        return False


def _times(entry: FlightEntry, wall_ahead: int) -> tuple[int, int, int]:
    """Return (started, ended, time on the device) in monotonic ns.

    The watchdog discovers both times up to 100 ms late; with the exact duration between them
    each bounds the other.
    """
    device_ns, milliseconds = -1, entry.duration_ms
    if milliseconds is not None and 0 <= milliseconds < _MAX_MS:
        device_ns = round(milliseconds * 1e6)
    ended = _monotonic(entry.time_discovered_completed_ns, wall_ahead)
    started = _monotonic(entry.time_discovered_started_ns, wall_ahead)
    if ended and device_ns >= 0:
        if started:
            ended = min(ended, started + device_ns)
        started = ended - device_ns
    return started, ended, device_ns


def _monotonic(wall_ns: int | None, wall_ahead: int) -> int:
    if not wall_ns:
        return 0
    time_ns = wall_ns - wall_ahead
    return time_ns if 0 < time_ns < 1 << 61 else 0
