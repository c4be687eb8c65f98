"""When collectives began and ended on each host: what the clocks are aligned by (D17)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from rankscope.chunk import Column
from rankscope.schema import ENDED, ClockOffset
from rankscope_server.detectors.clocks import Clocks, Exchange, Meeting, align_clocks

KEPT = 192  # operations of a group: two windows, and drift between them
# Chunks of ranks come seconds apart; where operations are so frequent that those kept span less,
# every second one is left out, and again, on all ranks the same.
_MIN_SPAN_NS = 30_000_000_000
MAX_MEETINGS = 4_096  # of all groups in one estimate
# Of the hosts' time between two estimates, and more with many hosts: the work grows by their
# square, 1.5 s of a core for a thousand.
_EVERY_NS = 10_000_000_000
_HOSTS_PER_INTERVAL = 128
# Nobody ends one of these before everybody has begun it. Not those in which a rank may have
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

    Of a host the last start and the first end count. A rank whose host is not known yet stands
    for itself, by its number.
    """

    def __init__(self, stride: int = 1) -> None:
        """Keep every `stride`th operation."""
        self._stride = stride
        self._rows: dict[str, dict[int, dict[str | int, tuple[int, int]]]] = {}
        self._strides: dict[str, int] = {}
        self._exchanges: dict[str, Exchange] = {}
        self._newest_ns = 0
        self._since_ns = 0  # what is older is of another program
        self._estimate: tuple[object, Clocks] | None = None
        self._leads: tuple[object, dict[str, NDArray[np.float64]]] | None = None

    def start_again(self, since_ns: int) -> None:
        """Forget everything before a rank came up as a new process: all count from 1 again."""
        self._since_ns = max(self._since_ns, since_ns)
        self._rows.clear()
        self._strides.clear()

    def add(self, rank: int, columns: Mapping[str, Column], host: str = "") -> None:
        """Take one chunk of collectives of a rank."""
        who: str | int = host or rank
        numbers = (
            np.asarray(columns[name]).tolist()
            for name in ("sequence", "arrived_ns", "duration_ns", "state", "size_bytes")
        )
        words = zip(columns["group"], columns["operation"], *numbers, strict=True)
        for group, operation, number, arrived_ns, duration_ns, state, size_bytes in words:
            if operation not in SYNCHRONISING or state != ENDED or duration_ns < 0 or number <= 0:
                continue
            if arrived_ns < self._since_ns or (not size_bytes and operation != "barrier"):
                continue
            if number % self._strides.get(group, self._stride):
                continue
            rows = self._rows.setdefault(group, {})
            row = rows.setdefault(number, {})
            start_ns, end_ns = row.get(who, (arrived_ns, arrived_ns + duration_ns))
            row[who] = (max(start_ns, arrived_ns), min(end_ns, arrived_ns + duration_ns))
            self._newest_ns = max(self._newest_ns, arrived_ns)
            if len(rows) > 2 * KEPT:
                self._thin(group, rows)

    def _thin(self, group: str, rows: dict[int, dict[str | int, tuple[int, int]]]) -> None:
        """Leave out the oldest operations, or every second one where they are frequent."""
        numbers = sorted(rows)
        first, last = (next(iter(rows[number].values()))[0] for number in (numbers[0], numbers[-1]))
        if abs(last - first) >= _MIN_SPAN_NS:
            gone = numbers[:-KEPT]
        else:
            stride = self._strides[group] = 2 * self._strides.get(group, self._stride)
            gone = [number for number in numbers if number % stride]
        for number in gone:
            del rows[number]

    def add_exchange(self, record: ClockOffset) -> None:
        """Take what a host measured against the server; the narrowest of the newest counts."""
        known = self._exchanges.get(record.host)
        if record.host and (known is None or record.time_ns > known.time_ns):
            self._exchanges[record.host] = Exchange(
                record.time_ns, -record.offset_ns, record.band_ns
            )

    def clocks(self, host_of: Mapping[int, str], drift_ratio: float) -> Clocks:
        """Return how the clocks of the hosts stand to each other, worked out now and then."""
        every_ns = _EVERY_NS * (1 + len(set(host_of.values())) // _HOSTS_PER_INTERVAL)
        key = (self._newest_ns // every_ns, len(host_of), len(self._exchanges), drift_ratio)
        if self._estimate is None or self._estimate[0] != key:
            hosts = sorted({host for host in host_of.values() if host} | set(self._exchanges))
            clocks = align_clocks(hosts, self._meetings(hosts, host_of), self._exchanges,
                                  drift_ratio)  # fmt: skip
            self._estimate = (key, clocks)
        return self._estimate[1]

    def leads_ms(self, names: Mapping[int, str]) -> dict[str, NDArray[np.float64]]:
        """Return how much later each clock read than the middle of the others, by operation.

        At the ends, which all see at nearly the same time; oldest first; worked out now and then.
        """
        key = (self._newest_ns // _EVERY_NS, len(names))
        if self._leads is None or self._leads[0] != key:
            hosts = sorted(set(names.values()))
            found: dict[str, list[float]] = {host: [] for host in hosts}
            for meeting in self._meetings(hosts, names):
                for at, place in enumerate(meeting.hosts.tolist()):
                    others = np.delete(meeting.ends_ns, at)
                    found[hosts[place]].append(float(meeting.ends_ns[at] - np.median(others)))
            self._leads = key, {host: np.array(leads) / 1e6 for host, leads in found.items()}
        return self._leads[1]

    def _meetings(self, hosts: list[str], host_of: Mapping[int, str]) -> list[Meeting]:
        """Return the operations in which at least two hosts were seen, oldest first."""
        place = {host: number for number, host in enumerate(hosts)}
        found = []
        share = max(MAX_MEETINGS // max(len(self._rows), 1), 8)
        for rows in self._rows.values():
            for number in sorted(rows)[-share:]:
                starts: dict[int, int] = {}
                ends: dict[int, int] = {}
                for who, (start, end) in rows[number].items():
                    name = who if isinstance(who, str) else host_of.get(who, "")
                    host = place.get(name)
                    if host is not None:
                        starts[host] = max(starts.get(host, start), start)
                        ends[host] = min(ends.get(host, end), end)
                if len(starts) > 1:
                    found.append(
                        Meeting(
                            np.fromiter(starts, np.int64, len(starts)),
                            np.fromiter(starts.values(), np.int64, len(starts)),
                            np.fromiter((ends[host] for host in starts), np.int64, len(starts)),
                        )
                    )
        return sorted(found, key=lambda meeting: int(meeting.starts_ns.min()))
