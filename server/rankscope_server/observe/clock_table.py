"""When collectives began and ended on each host: what the clocks are aligned by."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from statistics import median

import numpy as np
from numpy.typing import NDArray

from rankscope.wire.arrays import begins_of_runs
from rankscope.wire.schema import ENDED, ClockOffset
from rankscope_server.findings.statistics import Array
from rankscope_server.observe.clock_drift import Drift, drifts_of
from rankscope_server.observe.clocks import (
    Clocks,
    Exchange,
    Meetings,
    SameHosts,
    align_clocks,
)
from rankscope_server.observe.collectives import Collectives
from rankscope_server.observe.operation_clock_times import NEVER_NS, OperationClockTimes

MAX_MEETINGS = 4_096  # of all groups in one estimate
# With few hosts an estimate takes milliseconds and is made whenever something is new.
_FEW_HOSTS = 16
# Else of the hosts' time between two estimates, and more with many hosts: the work grows by their
# square, 1.5 s of a core for a thousand. At first more often, so that something is known soon.
_EVERY_NS = 10_000_000_000
_HOSTS_PER_INTERVAL = 128
_TABLES_PER_INTERVAL = 64
_SOON, _SOON_ON_A_HOST = 16, 4
_MAX_WAITING = 8_192  # events of a group
_KEPT_EXCHANGES = 4  # of a host, one a minute: the newest before the cut is among them
# No rank ends one of these before all have begun it. Not those in which a rank may have
# nothing to say to another: ragged ones, broadcasts, gathers.
SYNCHRONISING = frozenset(
    {
        "all_reduce", "all_reduce_coalesced", "barrier", "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced", "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
    }
)  # fmt: skip


class ClockTable:
    """Starts and ends of the newest synchronising collectives, by group, number and host.

    Of a host the last start and the first end count. A rank whose host is not known yet is
    for itself, by its number.
    """

    def __init__(self, stride: int = 1, host: str = "") -> None:
        """Keep every `stride`th operation. With a `host` the clocks are those of its ranks."""
        self._stride = stride
        # Ranks of many hosts would all be compared in the same second otherwise.
        self._phase_ratio = zlib.crc32(host.encode()) % 97 / 97 if host else 0.0
        self._is_paced = bool(host)
        self.num_tables = 1  # of hosts: the more, the rarer each of them is estimated
        self._operations: dict[str, OperationClockTimes] = {}  # by group
        self._waiting: dict[str, list[tuple[Array, ...]]] = {}  # by group, not put yet
        self._clock_numbers: dict[str | int, int] = {}  # a host, or a rank that has none
        self._exchanges: dict[str, dict[int, Exchange]] = {}  # host -> time -> what it measured
        self._span_ns: dict[str | int, tuple[int, int]] = {}  # of each host, by its own clock
        self._since_ns = 0  # what is older is of another program
        self._cut_ns = 0  # the estimate rests on what came before
        self._used: dict[str, int] = {}  # group -> highest number that it rests on
        self._estimate: tuple[object, Clocks] | None = None  # None once that changes
        self._leads_cut_ns = 0
        self._drifts: dict[str, Drift] = {}
        self._leads: tuple[object, dict[str, NDArray[np.float64]]] | None = None
        self._met: tuple[object, Meetings] | None = None  # None once events have come

    def start_again(self, since_ns: int) -> None:
        """Forget everything before a rank came up as a new process: all count from 1 again."""
        self._since_ns = max(self._since_ns, since_ns)
        self._operations.clear()
        self._waiting.clear()
        self._estimate = self._met = None

    def add(
        self,
        events: Collectives,
        clock_of: Mapping[int, str] | None = None,
        chosen: Array | None = None,
    ) -> None:
        """Take events that `synchronising` left, all or those `chosen` (ascending places).

        `clock_of` gives the host of a rank; a rank that has none there has a clock of its own.
        """
        kept = self._kept(events, chosen)
        if not len(kept):
            return
        self._met = None
        names, known = clock_of or {}, self._clock_numbers
        clocks = events.of_ranks(
            lambda rank: known.setdefault(names.get(rank) or rank, len(known)), kept
        )
        numbers, starts_ns = events["sequence"][kept], events["arrived_ns"][kept]
        ends_ns = starts_ns + events["duration_ns"][kept]
        self._note_all(clocks, starts_ns)
        for group, those in events.places_by_group(kept):
            self._take(group, numbers[those], clocks[those], starts_ns[those], ends_ns[those])

    def _kept(self, events: Collectives, chosen: Array | None) -> Array:
        """Return the places of events, of all or those `chosen`, that the tables keep now."""

        def left_out(group: str) -> int:
            held = self._operations.get(group)
            return (self._stride if held is None else held.stride) - 1

        those = slice(None) if chosen is None else chosen
        is_kept = (events["sequence"][those] & events.of_groups(left_out, those)) == 0
        places = np.flatnonzero(is_kept) if chosen is None else chosen[is_kept]
        kept: Array = places[events["arrived_ns"][places] >= self._since_ns]
        return kept

    def stride_of(self, groups: Iterable[str]) -> int:
        """Return of which numbers some of these groups keep every one, a power of two."""
        known = (self._operations.get(group) for group in groups)
        return min((self._stride if held is None else held.stride for held in known), default=1)

    def _take(
        self, group: str, numbers: Array, clocks: Array, starts_ns: Array, ends_ns: Array
    ) -> None:
        """Take events of a group; they are put into its table when that is read."""
        held = self._operations.get(group)
        if held is None:
            held = self._operations[group] = OperationClockTimes(self._stride)
        late = (numbers <= self._used.get(group, 0)) & held.may_hold(numbers)
        if late.any():
            self._estimate = None
        waiting = self._waiting.setdefault(group, [])
        waiting.append((numbers, clocks, starts_ns, ends_ns))
        if sum(len(part[0]) for part in waiting) > _MAX_WAITING:
            self._put_waiting(group)

    def _note_all(self, clocks: Array, times_ns: Array) -> None:
        """Note what time it was for each clock."""
        names = list(self._clock_numbers)
        order = np.argsort(clocks, kind="stable")
        clocks, times_ns = clocks[order], times_ns[order]
        begins = begins_of_runs(clocks)
        oldest, newest = (
            reduce.reduceat(times_ns, begins).tolist() for reduce in (np.minimum, np.maximum)
        )
        for clock, low, high in zip(clocks[begins].tolist(), oldest, newest, strict=True):
            self._note(names[clock], low, high)

    def _put_waiting(self, group: str) -> None:
        """Put what came of a group since the last time into its table, as one."""
        held, waiting = self._operations[group], self._waiting.pop(group, [])
        if waiting:
            columns = [np.concatenate(parts) for parts in zip(*waiting, strict=True)]
            kept = held.is_kept(columns[0])
            if kept.any():
                held.put(*(column[kept] for column in columns))

    def add_exchange(self, record: ClockOffset) -> None:
        """Take what a host measured against the server."""
        if not record.host:
            return
        known = self._exchanges.setdefault(record.host, {})
        known[record.time_ns] = Exchange(record.time_ns, -record.offset_ns, record.band_ns)
        if len(known) > _KEPT_EXCHANGES:
            del known[min(known)]
        self._note(record.host, record.time_ns, record.time_ns)

    def _note(self, who: str | int, low_ns: int, high_ns: int) -> None:
        """Note what time it was for a host, and whether the estimate rests on other times now."""
        oldest_ns, newest_ns = self._span_ns.get(who, (low_ns, high_ns))
        self._span_ns[who] = (min(oldest_ns, low_ns), max(newest_ns, high_ns))
        if low_ns < self._cut_ns:
            self._estimate = None
        if low_ns < self._leads_cut_ns:
            self._leads = None

    def clocks(self, host_of: Mapping[int, str], drift_ratio: float) -> Clocks:
        """Return how far the clocks of the hosts are apart.

        Of many hosts what is younger than the last whole interval waits for the next, and widens
        the bounds: an estimate is made now and then, yet does not depend on when it is read.
        """
        if not self._span_ns:
            return Clocks((), np.zeros((0, 0)))
        hosts = sorted({host for host in host_of.values() if host} | set(self._exchanges))
        # In the middle of the hosts: the clock of one may be far off.
        oldest_ns, newest_ns = (
            int(median(ends)) for ends in zip(*self._span_ns.values(), strict=True)
        )
        self._cut_ns, lag_ns = NEVER_NS, 0
        if len(hosts) > _FEW_HOSTS or self._is_paced:
            every_ns = self._every_ns() * (1 + len(hosts) // _HOSTS_PER_INTERVAL)
            if newest_ns - oldest_ns < 2 * every_ns:
                every_ns //= self._soon()
            cut_ns = self._cut(newest_ns, every_ns)
            if cut_ns > oldest_ns:
                self._cut_ns, lag_ns = cut_ns, newest_ns - cut_ns
        key = (self._cut_ns, tuple(host_of.values()), drift_ratio)
        if self._estimate is None or self._estimate[0] != key:
            meetings = self._meetings(hosts, host_of)
            clocks = align_clocks(hosts, meetings, self._exchanges_before(self._cut_ns),
                                  drift_ratio)  # fmt: skip
            self._estimate = (key, clocks)
        return self._estimate[1].wider(drift_ratio * lag_ns)

    def _soon(self) -> int:
        """Return how many times as often the first estimates are made."""
        if not self._is_paced:
            return _SOON
        return _SOON_ON_A_HOST if self.num_tables <= _TABLES_PER_INTERVAL else 1

    def _every_ns(self) -> int:
        return _EVERY_NS * (1 + self.num_tables // _TABLES_PER_INTERVAL)

    def _cut(self, time_ns: int, every_ns: int) -> int:
        """Return the last end of an interval before a time."""
        phase_ns = int(self._phase_ratio * every_ns)
        return (time_ns - phase_ns) // every_ns * every_ns + phase_ns

    def _exchanges_before(self, cut_ns: int) -> dict[str, Exchange]:
        """Return the newest exchange of each host before a time, its first where all are later."""
        found = {}
        for host, known in self._exchanges.items():
            times = sorted(known)
            found[host] = known[max((time for time in times if time < cut_ns), default=times[0])]
        return found

    def leads_ms(self, names: Mapping[int, str]) -> dict[str, NDArray[np.float64]]:
        """Return how much later each clock read than the middle of all, by operation.

        At the ends, which all see at nearly the same time; oldest first. What is younger than the
        last whole interval waits for the next.
        """
        hosts = sorted(set(names.values()))
        newest_ns = max((newest for _, newest in self._span_ns.values()), default=0)
        self._leads_cut_ns = self._cut(newest_ns, self._every_ns())
        key = (self._leads_cut_ns, tuple(hosts))
        if self._leads is None or self._leads[0] != key:
            meetings = self._meetings(hosts, names)
            leads = _leads_ms(meetings, len(hosts), self._leads_cut_ns)
            known = {
                host: column[~np.isnan(column)] for host, column in zip(hosts, leads.T, strict=True)
            }
            self._leads, self._drifts = (key, known), drifts_of(known)
        self._met = None  # many objects; of one look both estimates are made
        return self._leads[1]

    def drifts(self, names: Mapping[int, str]) -> dict[str, Drift]:
        """Return how each clock's lead changes (see `leads_ms`)."""
        self.leads_ms(names)
        return self._drifts

    def _meetings(self, hosts: list[str], host_of: Mapping[int, str]) -> Meetings:
        """Return the operations before the cut that at least two hosts were seen in.

        Notes up to which number of each group they go.
        """
        key = (self._cut_ns, tuple(hosts), tuple(host_of.items()))
        if self._met is not None and self._met[0] == key:
            return self._met[1]
        place = {host: number for number, host in enumerate(hosts)}
        places = np.array(
            [place.get(clock if isinstance(clock, str) else host_of.get(clock, ""), -1)
             for clock in self._clock_numbers], np.int64,
        )  # fmt: skip
        found: list[SameHosts] = []
        share = max(MAX_MEETINGS // max(len(self._operations), 1), 8)
        self._used = {}
        for group, held in self._operations.items():
            self._put_waiting(group)
            is_known, met = _met_in(*held.newest(share), places, self._cut_ns)
            known = np.flatnonzero(is_known)
            if len(known):
                self._used[group] = int(held.numbers[-len(is_known) :][known[-1]])
            found += met
        self._met = (key, Meetings.of(found))
        return self._met[1]


def _leads_ms(meetings: Meetings, num_hosts: int, cut_ns: int) -> Array:
    """Return how much later each clock read than the middle, operations x hosts; NaN: not there."""
    leads = np.full((len(meetings), num_hosts), np.nan)
    for part in meetings.parts:
        # small: floats do not distinguish the times themselves
        apart_ns = part.ends_ns - part.ends_ns[:, :1]
        lead_ms = (apart_ns - np.median(apart_ns, axis=1, keepdims=True)) / 1e6
        lead_ms[part.starts_ns.min(axis=1) >= cut_ns] = np.nan
        leads[np.ix_(part.places, part.hosts)] = lead_ms
    return leads


def synchronising(events: Collectives, stride: int = 1) -> Collectives:
    """Return the events that clocks are aligned by: none of them ends before all have begun.

    Of every `stride`th number, a power of two.
    """
    names = ("sequence", "arrived_ns", "duration_ns")
    is_good = [
        shape.operation in SYNCHRONISING
        and (shape.size_bytes > 0 or shape.operation == "barrier")
        for shape in events.shapes
    ]  # fmt: skip
    if stride > 1:  # the rest is of the few that are left
        events = events.where(
            np.flatnonzero((events["sequence"] & (stride - 1)) == 0), (*names, "state")
        )
    good = events.of_shapes(is_good) != 0
    good &= (events["state"] == ENDED) & (events["duration_ns"] >= 0) & (events["sequence"] > 0)
    return events.where(np.flatnonzero(good), names)


def _met_in(
    starts_ns: Array, ends_ns: Array, place_of_clock: Array, cut_ns: int
) -> tuple[Array, list[SameHosts]]:
    """Return which operations were before the cut, and those of them that hosts met in.

    Of operations x clocks; one that no host was seen in was never.
    """
    places = place_of_clock[: starts_ns.shape[1]]
    order = np.argsort(places, kind="stable")
    order = order[places[order] >= 0]
    if not len(order):
        return np.zeros(len(starts_ns), bool), []
    begins = begins_of_runs(places[order])
    hosts = places[order][begins]
    starts = np.maximum.reduceat(starts_ns[:, order], begins, axis=1)
    ends = np.minimum.reduceat(ends_ns[:, order], begins, axis=1)
    is_seen = ends < NEVER_NS
    count = is_seen.sum(axis=1)
    in_order = np.sort(np.where(is_seen, starts, NEVER_NS), axis=1)
    times = in_order[np.arange(len(starts)), count // 2]
    is_known = (times < cut_ns) & (count > 0)
    met = np.flatnonzero(is_known & (count > 1))
    alike: dict[bytes, list[int]] = {}
    for row in met.tolist():
        alike.setdefault(is_seen[row].tobytes(), []).append(row)
    found = []
    for rows in map(np.array, alike.values()):
        those = np.flatnonzero(is_seen[rows[0]])
        cells = np.ix_(rows, those)
        found.append(SameHosts(hosts[those], rows, times[rows], starts[cells], ends[cells]))
    return is_known, found
