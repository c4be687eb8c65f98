"""How far the clocks of hosts are apart, with bounds that hold.

A host's clock shows true time + theta. No rank ends a synchronising collective before the last one
has begun it, so start_i - end_j <= theta_i - theta_j for all pairs of hosts and all operations:
no assumption about the network is needed. Each pair's largest such difference, closed by shortest
paths, bounds theta_i - theta_j from both sides. A clock may drift, so what an operation says fades
with its age; the drift itself is bounded by two windows far apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np

WINDOW = 100  # operations
_MIN_WINDOW = 6
_MAX_PIVOTS = 128  # shortest paths over more hosts go by way of a sample: wider, yet true
_MAX_LIKELY = 256  # hosts; beyond, the middle of the bounds must do
_CELLS_AT_ONCE = 1 << 18  # operations x hosts x hosts
Order: TypeAlias = Literal["before", "after", "unknown"]
SERVER = ""  # the name of the server among the hosts


@dataclass(frozen=True, slots=True)
class Meeting:
    """One operation: for each host that took part its last start and its first end, own clock."""

    hosts: Any  # places in the list of hosts
    starts_ns: Any
    ends_ns: Any

    @property
    def time_ns(self) -> int:
        """Return when it began by the clock in the middle."""
        return int(np.sort(self.starts_ns)[len(self.starts_ns) // 2])


@dataclass(frozen=True, slots=True)
class Exchange:
    """The four times of a request: this host's clock minus the server's, and how wrong at most."""

    time_ns: int
    ahead_ns: int
    band_ns: int


class Clocks:
    """Bounds on the differences of clocks. `upper_ns[i, j]` bounds theta_i - theta_j from above.

    Unknown differences are infinite. `likely_ns` is the difference if no clock drifts, where that
    contradicts nothing: clocks under a time service hardly do. The band never rests on it.
    `stepped` are hosts whose clock was set of late.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        upper_ns: Any,
        likely_ns: Any = None,
        stepped: Sequence[str] = (),
    ) -> None:
        self.hosts = tuple(hosts)
        self.stepped = tuple(stepped)
        self._upper = upper_ns
        with np.errstate(invalid="ignore"):  # of what nothing bounds
            middle = (upper_ns - upper_ns.T) / 2 if likely_ns is None else likely_ns
            self._middle = np.clip(middle, -upper_ns.T, upper_ns)
            self._band = np.maximum(upper_ns - self._middle, self._middle + upper_ns.T)
        self._place = {host: place for place, host in enumerate(hosts)}

    def wider(self, by_ns: float) -> Clocks:
        """Return these bounds when nothing was heard for a time in which clocks drift so much."""
        if not by_ns:
            return self
        off = by_ns * (1 - np.eye(len(self.hosts)))
        return Clocks(self.hosts, self._upper + off, self._middle, self.stepped)

    def difference_ms(self, host: str, other: str) -> tuple[float, float] | None:
        """Return (how far `host` is ahead of `other`, band); None where nothing bounds it."""
        if host == other:
            return 0.0, 0.0
        a, b = self._place.get(host), self._place.get(other)
        if a is None or b is None:
            return None
        if not np.isfinite(self._upper[a, b] + self._upper[b, a]):
            return None
        return float(self._middle[a, b]) / 1e6, float(self._band[a, b]) / 1e6

    def order(self, host: str, time_ns: int, other: str, other_ns: int) -> Order:
        """Return whether an event on `host` came before one on `other`, each on its own clock.

        "unknown" means: at the same time within `band_ms`.
        """
        apart = time_ns - other_ns
        if host == other:
            return "before" if apart < 0 else "after" if apart > 0 else "unknown"
        a, b = self._place.get(host), self._place.get(other)
        if a is None or b is None:
            return "unknown"
        if apart - float(self._upper[a, b]) > 0:
            return "after"
        return "before" if apart + float(self._upper[b, a]) < 0 else "unknown"

    def band_ms(self, host: str, other: str) -> float:
        """Return within what time events on two hosts have no order; infinite where not known."""
        found = self.difference_ms(host, other)
        return float("inf") if found is None else found[1]

    def against_all(self) -> dict[str, tuple[float, float]]:
        """Return for each host how far it is ahead of the middle of all hosts, and the band, ms.

        Hosts that nothing connects with most of the others are left out. Not to be changed.
        """
        return self._against_all

    @cached_property
    def _against_all(self) -> dict[str, tuple[float, float]]:
        if len(self.hosts) < 2:
            return {}
        middle, band = self._middle / 1e6, self._band / 1e6
        found = {}
        for place, host in enumerate(self.hosts):
            known = np.isfinite(band[place])
            if host != SERVER and 2 * known.sum() > len(self.hosts):
                others = np.argsort(middle[place][known])[(int(known.sum()) - 1) // 2]
                found[host] = (
                    float(middle[place][known][others]), float(band[place][known][others]),
                )  # fmt: skip
        return found


def align_clocks(
    hosts: Sequence[str],
    meetings: Sequence[Meeting],
    exchanges: Mapping[str, Exchange],
    drift_ratio: float,
) -> Clocks:
    """Return the bounds at the time of the newest operation. `meetings` come oldest first.

    `drift_ratio`: no two clocks of sound hosts run apart faster. Where the bounds contradict each
    other a clock was set: then only what came after counts.
    """
    names = [*hosts, SERVER] if exchanges else list(hosts)
    now_ns = (
        meetings[-1].time_ns
        if meetings
        else max((exchange.time_ns for exchange in exchanges.values()), default=0)
    )
    half = np.full(len(names), drift_ratio / 2)
    drift = np.zeros(len(names))
    size = _connected_window(meetings, len(hosts))
    newest = meetings[-size:]
    upper = _bounds(names, newest, now_ns, drift, half)
    stepped: list[str] = []
    if size and len(meetings) >= 2 * size:
        old = meetings[:size]
        old_ns = old[-1].time_ns
        before = _bounds(names, old, old_ns, drift, half)
        stepped = _stepped(names, before, upper, drift_ratio * (now_ns - old_ns))
        if not stepped and _is_sound(upper) and _is_sound(before) and now_ns > old_ns:
            drift, half = _drift(before, upper, now_ns - old_ns, drift_ratio)
            finer = _bounds(names, meetings, now_ns, drift, half)
            upper = np.minimum(upper, finer) if _is_sound(finer) else upper
    while not _is_sound(upper) and size > _MIN_WINDOW:
        size //= 2
        upper = _bounds(names, meetings[-size:], now_ns, np.zeros(len(names)),
                        np.full(len(names), drift_ratio / 2))  # fmt: skip
    if not _is_sound(upper):
        upper = _unknown(len(names))
    upper = _with_exchanges(names, upper, exchanges, now_ns, drift_ratio)
    return Clocks(names, upper, _likely(names, meetings[-2 * size :], now_ns), stepped)


def _likely(names: Sequence[str], meetings: Sequence[Meeting], now_ns: int) -> Any:
    """Return the differences if no clock drifts, from as many operations as agree with that."""
    none = np.zeros(len(names))
    if len(names) > _MAX_LIKELY:
        return None
    while len(meetings) >= _MIN_WINDOW:
        upper = _bounds(names, meetings, now_ns, none, none)
        if _is_sound(upper):
            with np.errstate(invalid="ignore"):
                middle = (upper - upper.T) / 2
            return middle if np.isfinite(middle).all() else None
        meetings = meetings[len(meetings) // 2 :]
    return None


def _connected_window(meetings: Sequence[Meeting], num_hosts: int) -> int:
    """Return how many of the newest operations count: 100 of each group, by their size."""
    if not meetings:
        return 0
    part = float(np.mean([len(meeting.hosts) for meeting in meetings]))
    return min(len(meetings), int(WINDOW * max(num_hosts / part, 1.0)))


def _unknown(count: int) -> Any:
    upper = np.full((count, count), np.inf)
    np.fill_diagonal(upper, 0.0)
    return upper


def _bounds(
    names: Sequence[str], meetings: Sequence[Meeting], now_ns: int, drift: Any, half: Any
) -> Any:
    """Return the closed upper bounds at `now_ns`, ns; a negative diagonal is a contradiction.

    A clock that gains `drift` (within `half`) showed less before: what it showed is brought to
    `now_ns`, and what is not known of its drift widens the bound.
    """
    upper = _unknown(len(names))
    for places, starts_ns, ends_ns in _blocks(meetings):
        age = now_ns - np.sort(starts_ns, 1)[:, len(places) // 2, None]
        starts = starts_ns - now_ns + drift[places] * age - half[places] * abs(age)
        ends = ends_ns - now_ns + drift[places] * age + half[places] * abs(age)
        block = np.ix_(places, places)
        # start_i - end_j <= theta_i - theta_j, so theta_j - theta_i <= end_j - start_i
        least = (ends[:, :, None] - starts[:, None, :]).min(0)
        upper[block] = np.minimum(upper[block], least)
    np.fill_diagonal(upper, np.minimum(np.diag(upper), 0.0))
    return _closed(upper)


def _blocks(meetings: Sequence[Meeting]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield places, starts and ends (operations x hosts) of operations of the same hosts."""
    for rows, places in places_of_same_hosts(meetings):
        size = max(1, _CELLS_AT_ONCE // len(places) ** 2)
        for begin in range(0, len(rows), size):
            part = [meetings[row] for row in rows[begin : begin + size]]
            yield (places, np.array([one.starts_ns for one in part]),
                   np.array([one.ends_ns for one in part]))  # fmt: skip


def places_of_same_hosts(meetings: Sequence[Meeting]) -> Iterator[tuple[list[int], Any]]:
    """Yield the places of operations of the same hosts, and these hosts."""
    same: dict[bytes, list[int]] = defaultdict(list)
    for place, meeting in enumerate(meetings):
        same[meeting.hosts.tobytes()].append(place)
    for places in same.values():
        yield places, meetings[places[0]].hosts


def _closed(upper: Any) -> Any:
    """Return the bounds closed over paths (Floyd and Warshall)."""
    count = len(upper)
    step = max(1, -(-count // _MAX_PIVOTS))
    for pivot in range(0, count, step):
        np.minimum(upper, upper[:, pivot, None] + upper[None, pivot, :], out=upper)
    return upper


def _is_sound(upper: Any) -> bool:
    return bool((np.diag(upper) >= 0).all() and (upper + upper.T >= 0).all())


def _drift(before: Any, after: Any, elapsed_ns: float, drift_ratio: float) -> tuple[Any, Any]:
    """Return each clock's drift against the one that is known best, and by how much at most wrong.

    Two intervals a time apart bound the slope between them.
    """
    width = np.where(np.isfinite(after + before.T), after + after.T, np.inf)
    anchor = int(np.argmin(width.sum(0)))
    high = (after[:, anchor] + before[anchor, :]) / elapsed_ns
    low = -(after[anchor, :] + before[:, anchor]) / elapsed_ns
    high, low = np.minimum(high, drift_ratio), np.maximum(low, -drift_ratio)
    sound = high >= low
    drift = np.where(sound, (high + low) / 2, 0.0)
    half = np.where(sound, (high - low) / 2, drift_ratio)
    half[anchor] = 0.0
    return drift, half


def _stepped(names: Sequence[str], before: Any, after: Any, slack_ns: float) -> list[str]:
    """Return the hosts whose difference to most others has changed by more than clocks drift."""
    if not (_is_sound(before) and _is_sound(after)):
        return []
    changed = (-after.T > before + slack_ns) | (after < -before.T - slack_ns)
    known = np.isfinite(before + after) & ~np.eye(len(names), dtype=bool)
    count, of = (changed & known).sum(1), known.sum(1)
    return [name for place, name in enumerate(names) if of[place] and 2 * count[place] > of[place]]


def _with_exchanges(
    names: Sequence[str], upper: Any, exchanges: Mapping[str, Exchange], now_ns: int,
    drift_ratio: float,
) -> Any:  # fmt: skip
    """Add what requests to the server show; leave out what contradicts the collectives."""
    if not exchanges:
        return upper
    place = {name: number for number, name in enumerate(names)}
    server = place[SERVER]
    wider = upper.copy()
    for host, exchange in exchanges.items():
        band = exchange.band_ns + drift_ratio * abs(now_ns - exchange.time_ns)
        here = place[host]
        wider[here, server] = min(wider[here, server], exchange.ahead_ns + band)
        wider[server, here] = min(wider[server, here], -exchange.ahead_ns + band)
    wider = _closed(wider)
    return wider if _is_sound(wider) else upper
