"""TCP connections between ranks over the last four minutes, in stretches of four seconds.

Each end of a connection is sampled on its own node; two rows are the two ends of one connection
if the local address of each is the remote address of the other. What has no such partner, for
example behind translated addresses, is not used. Chunks are taken once, in any order; counters
are totals, so that a lost sample costs resolution and no truth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from rankscope.wire.chunk import Column
from rankscope_server.findings.statistics import Array

STRETCH_SECONDS = 4
NUM_STRETCHES = 64
_STRETCH_NS = STRETCH_SECONDS * 10**9
MAX_ENDS = 32_768  # two for each connection; 200 MB
_COLUMNS: tuple[str, ...] = (
    "time_ns",
    "acknowledged_bytes_total",
    "busy_us_total",
    "receiver_limited_us_total",
    "sent_segments_total",
    "retransmitted_segments_total",
    "needless_segments_total",
    "dropped_segments_total",
    "unsent_bytes",
    "in_flight_segments",
    "window_segments",
    "backoff",
)
(_TIME, _ACKNOWLEDGED, _BUSY, _LIMITED, _SENT, _AGAIN, _NEEDLESS, _DROPPED, _UNSENT, _IN_FLIGHT,
 _WINDOW, _BACKOFF) = range(len(_COLUMNS))  # fmt: skip
_TOTALS = slice(_ACKNOWLEDGED, _DROPPED + 1)
_LOOPBACK = ("127.", "[::1]")
End: TypeAlias = tuple[str, str, str]  # scope, local address, remote address


@dataclass(frozen=True, slots=True)
class Flow:
    """What one rank sent to another over a time, over all of their connections."""

    sender: int
    receiver: int
    seconds: float
    num_bytes: int  # known to have arrived
    busy_seconds: float  # with data under way, without the time in which the receiver took no more
    sent: int  # segments with data
    lost: int  # segments that had to be sent again and had not arrived
    dropped: int  # segments that the receiver's own kernel threw away; 0 where not known
    waiting: int  # samples in which data waited at the sender
    held: int  # of these: in which neither network nor receiver stood in its way
    stuck_seconds: float  # for so long nothing arrived although it is sent again and again

    @property
    def rate(self) -> float:
        """Return bytes per second while busy."""
        return self.num_bytes / max(self.busy_seconds, 1e-3)


class ConnectionTable:
    """The connections of all ranks of a run."""

    def __init__(self) -> None:
        self._row_of: dict[End, int] = {}
        self._rank = np.zeros(0, np.int64)
        self._cells = np.full((len(_COLUMNS), 0, NUM_STRETCHES), -1, np.int64)
        self._pairs: tuple[Array, Array] | None = None  # rows of both ends, until more ends come

    def add(self, host: str, columns: Mapping[str, Column]) -> None:
        """Take one chunk of samples of a node."""
        values = np.stack([np.asarray(columns[name], np.int64) for name in _COLUMNS])
        order = np.argsort(values[_TIME], kind="stable")
        ends = [
            (host if str(local).startswith(_LOOPBACK) else "", str(local), str(remote))
            for local, remote in zip(columns["local"], columns["remote"], strict=True)
        ]
        if len(self._row_of) + len(ends) > MAX_ENDS:
            self._make_room()
        rows = np.fromiter((self._row(end) for end in ends), np.int64, len(ends))[order]
        values, ranks = values[:, order], np.asarray(columns["rank"], np.int64)[order]
        if not np.all(known := rows >= 0):
            rows, values, ranks = rows[known], values[:, known], ranks[known]
        slots = values[_TIME] // _STRETCH_NS % NUM_STRETCHES
        is_newest = values[_TIME] >= self._cells[_TIME, rows].max(axis=1)
        if np.any(changed := is_newest & (self._rank[rows] != ranks)):
            self._rank[rows[changed]] = ranks[changed]
            self._pairs = None
        later = values[_TIME] >= self._cells[_TIME, rows, slots]
        rows, slots = rows[later], slots[later]
        self._cells[:, rows, slots] = values[:, later]  # of two in a stretch the newest

    def _row(self, end: End) -> int:
        """Return the row of an end, a new one where it is not known; -1 where there is no room."""
        row = self._row_of.get(end)
        if row is not None:
            return row
        if len(self._row_of) >= MAX_ENDS:
            return -1
        row = self._row_of[end] = len(self._row_of)
        self._pairs = None
        if row >= len(self._rank):
            more = max(64, len(self._rank))
            self._rank = np.concatenate([self._rank, np.full(more, -1)])
            empty = np.full((len(_COLUMNS), more, NUM_STRETCHES), -1, np.int64)
            self._cells = np.concatenate([self._cells, empty], axis=1)
        return row

    def _make_room(self) -> None:
        """Forget the ends that were not sampled for longest, if they are old."""
        newest = self._cells[_TIME].max(axis=1, initial=-1)
        border = newest.max() - NUM_STRETCHES * _STRETCH_NS
        kept = [(end, row) for end, row in self._row_of.items() if newest[row] >= border]
        rows = np.array([row for _, row in kept], np.int64)
        self._row_of = {end: place for place, (end, _) in enumerate(kept)}
        self._rank, self._cells = self._rank[rows], self._cells[:, rows]
        self._pairs = None

    # --- reading -----------------------------------------------------------------------------

    @property
    def ranks(self) -> frozenset[int]:
        """Return the ranks of which a connection to another rank is known at both ends."""
        ends, _ = self._joined()
        return frozenset(self._rank[ends].tolist())

    @property
    def newest_ns(self) -> int:
        """Return when the newest sample was taken, 0 for none."""
        return int(self._cells[_TIME].max(initial=0))

    def flows(self, begin_ns: float, end_ns: float) -> list[Flow]:
        """Return what each rank sent to each other in a time, for those sampled twice in it."""
        ends, others = self._joined()
        if not len(ends):
            return []
        times = self._cells[_TIME]
        inside = (times >= begin_ns) & (times <= end_ns)
        first = np.where(inside, times, np.iinfo(np.int64).max).argmin(axis=1)
        last = np.where(inside, times, -1).argmax(axis=1)
        rows = np.arange(len(times))
        rise = self._cells[:, rows, last] - self._cells[:, rows, first]
        # a difference below zero is a counter that began anew
        good = (inside.sum(axis=1) >= 2) & np.all(rise[_TOTALS] >= 0, axis=0)
        waits = inside & (self._cells[_UNSENT] > 0)
        # Nothing is under way: the network, if it were what limits, would be at work on something.
        # A sender that does not pace itself fills the window of a network that limits it.
        window, flying = self._cells[_WINDOW], self._cells[_IN_FLIGHT]
        holds = waits & ((flying == 0) | ((window >= 0) & (2 * flying < window)))
        busy = np.maximum(rise[_BUSY] - rise[_LIMITED], 0)
        lost = np.maximum(rise[_AGAIN] - rise[_NEEDLESS], 0)
        dropped = np.where(good, rise[_DROPPED], 0)
        known = good[ends]
        ends, others = ends[known], others[known]
        columns = (
            self._rank[ends], self._rank[others], rise[_TIME, ends] / 1e9,
            rise[_ACKNOWLEDGED, ends], busy[ends] / 1e6, rise[_SENT, ends], lost[ends],
            dropped[others], waits.sum(axis=1)[ends], holds.sum(axis=1)[ends],
            self._stuck_seconds(inside, last)[ends],
        )  # fmt: skip
        parts: dict[tuple[int, int], list[Flow]] = {}
        for values in zip(*(column.tolist() for column in columns), strict=True):
            parts.setdefault(values[:2], []).append(Flow(*values))
        return [_together(flows) for _, flows in sorted(parts.items())]

    def _stuck_seconds(self, inside: Array, last: Array) -> Array:
        """Return for how long each end has sent the same data again without an answer."""
        rows = np.arange(len(last))
        now = self._cells[:, rows, last]
        same = inside & (self._cells[_ACKNOWLEDGED] == now[_ACKNOWLEDGED, :, None])
        since = np.where(same, self._cells[_TIME], np.iinfo(np.int64).max).min(axis=1)
        is_stuck = (now[_BACKOFF] > 1) & (now[_IN_FLIGHT] > 0) & inside.any(axis=1)
        return np.where(is_stuck, (now[_TIME] - since) / 1e9, 0.0)

    def _joined(self) -> tuple[Array, Array]:
        """Return the rows of all ends whose other end belongs to another rank, and of those."""
        if self._pairs is None:
            found = [
                (row, other)
                for (scope, local, remote), row in self._row_of.items()
                if (other := self._row_of.get((scope, remote, local))) is not None
                and self._rank[row] != self._rank[other]
            ]
            both = np.array(found, np.int64).reshape(-1, 2)
            self._pairs = both[:, 0], both[:, 1]
        return self._pairs


def _together(flows: list[Flow]) -> Flow:
    """Return several connections of a pair as one: the busiest gives the time, all the rest."""
    if len(flows) == 1:
        return flows[0]
    return Flow(
        flows[0].sender,
        flows[0].receiver,
        max(flow.seconds for flow in flows),
        sum(flow.num_bytes for flow in flows),
        max(flow.busy_seconds for flow in flows),
        sum(flow.sent for flow in flows),
        sum(flow.lost for flow in flows),
        sum(flow.dropped for flow in flows),
        sum(flow.waiting for flow in flows),
        sum(flow.held for flow in flows),
        max(flow.stuck_seconds for flow in flows),
    )
