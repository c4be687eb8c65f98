"""When collectives began and ended on each host: what the clocks are aligned by (D17)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rankscope.chunk import Column
from rankscope.schema import ENDED, ClockOffset
from rankscope_server.detectors.clocks import Clocks, Exchange, Meeting, align_clocks

KEPT = 512  # operations of a group
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
    """Starts and ends of the newest synchronising collectives, by group, number and rank."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[int, dict[int, tuple[int, int]]]] = {}
        self._exchanges: dict[str, Exchange] = {}
        self._newest_ns = 0
        self._since_ns = 0  # what is older is of another program
        self._estimate: tuple[object, Clocks] | None = None

    def start_again(self, since_ns: int) -> None:
        """Forget everything before a rank came up as a new process: all count from 1 again."""
        self._since_ns = max(self._since_ns, since_ns)
        self._rows.clear()

    def add(self, rank: int, columns: Mapping[str, Column]) -> None:
        """Take one chunk of collectives of a rank."""
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
            rows = self._rows.setdefault(group, {})
            rows.setdefault(number, {})[rank] = (arrived_ns, arrived_ns + duration_ns)
            self._newest_ns = max(self._newest_ns, arrived_ns)
            if len(rows) > 2 * KEPT:
                for old in sorted(rows)[:-KEPT]:
                    del rows[old]

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

    def _meetings(self, hosts: list[str], host_of: Mapping[int, str]) -> list[Meeting]:
        """Return the operations in which at least two hosts were seen, oldest first."""
        place = {host: number for number, host in enumerate(hosts)}
        found = []
        share = max(MAX_MEETINGS // max(len(self._rows), 1), 8)
        for rows in self._rows.values():
            for number in sorted(rows)[-share:]:
                starts: dict[int, int] = {}
                ends: dict[int, int] = {}
                for rank, (start, end) in rows[number].items():
                    host = place.get(host_of.get(rank, ""))
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
