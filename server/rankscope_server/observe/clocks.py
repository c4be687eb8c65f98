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
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

WINDOW = 100  # operations
_MIN_WINDOW = 6
_MAX_PIVOTS = 128  # shortest paths over more hosts go by way of a sample: wider, yet true
_MAX_LIKELY = 256  # hosts; beyond, the middle of the bounds must do
_CELLS_AT_ONCE = 1 << 18  # operations x hosts x hosts
Order: TypeAlias = Literal["before", "after", "unknown"]
SERVER = ""  # the name of the server among the hosts


class SameHosts(NamedTuple):
    """Operations in which the same hosts took part, by what each of their clocks showed."""

    hosts: Any  # places in the list of hosts
    places: Any  # of each operation in the order of time of all, ascending
    times_ns: Any  # when each began, by the clock in the middle
    starts_ns: Any  # operations x hosts: the last start
    ends_ns: Any  # the first end

    def where(self, chosen: Any) -> SameHosts:
        """Return some of the operations."""
        return SameHosts(self.hosts, *(column[chosen] for column in self[1:]))


class Meetings:
    """Operations that at least two hosts took part in, in order of time."""

    def __init__(self, parts: Sequence[SameHosts], begin: int, end: int) -> None:
        self.parts = parts
        self._begin, self._end = begin, end  # among all that there were

    @classmethod
    def of(cls, found: Sequence[SameHosts]) -> Meetings:
        """Put operations in order; of those of one time the first one stays the first."""
        if not found:
            return cls((), 0, 0)
        order = np.argsort(np.concatenate([part.times_ns for part in found]), kind="stable")
        places = np.empty(len(order), np.int64)
        places[order] = np.arange(len(order))
        alike: dict[bytes, list[SameHosts]] = defaultdict(list)
        at = 0
        for part in found:
            mine = places[at : at + len(part.times_ns)]
            alike[part.hosts.tobytes()].append(part._replace(places=mine))
            at += len(mine)
        parts = []
        for same in alike.values():
            columns = [
                np.concatenate(column) for column in zip(*(p[1:] for p in same), strict=True)
            ]
            joined = SameHosts(same[0].hosts, *columns)
            parts.append(joined.where(np.argsort(joined.places)))
        return cls(parts, 0, len(order))

    def __len__(self) -> int:
        return self._end - self._begin

    @property
    def newest_ns(self) -> int:
        """Return when the newest one began."""
        return int(max(part.times_ns[-1] for part in self.parts))

    @property
    def mean_hosts(self) -> float:
        """Return how many hosts take part in one."""
        return sum(len(part.hosts) * len(part.times_ns) for part in self.parts) / len(self)

    def between(self, begin: int, end: int) -> Meetings:
        """Return those from one place to another."""
        begin, end = self._begin + begin, self._begin + min(end, len(self))
        parts = []
        for part in self.parts:
            low, high = np.searchsorted(part.places, (begin, end)).tolist()
            if low < high:
                parts.append(part.where(slice(low, high)))
        return Meetings(parts, begin, end)

    def newest(self, count: int) -> Meetings:
        """Return so many of the newest ones, all where there are fewer."""
        return self.between(max(len(self) - count, 0), len(self))


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
    meetings: Meetings,
    exchanges: Mapping[str, Exchange],
    drift_ratio: float,
) -> Clocks:
    """Return the bounds at the time of the newest operation.

    `drift_ratio`: no two clocks of sound hosts run apart faster. Where the bounds contradict each
    other a clock was set: then only what came after counts.
    """
    names = [*hosts, SERVER] if exchanges else list(hosts)
    now_ns = (
        meetings.newest_ns
        if len(meetings)
        else max((exchange.time_ns for exchange in exchanges.values()), default=0)
    )
    half = np.full(len(names), drift_ratio / 2)
    drift = np.zeros(len(names))
    size = _connected_window(meetings, len(hosts))
    upper = _bounds(names, meetings.newest(size), now_ns, drift, half)
    stepped: list[str] = []
    if size and len(meetings) >= 2 * size:
        old = meetings.between(0, size)
        old_ns = old.newest_ns
        before = _bounds(names, old, old_ns, drift, half)
        stepped = _stepped(names, before, upper, drift_ratio * (now_ns - old_ns))
        if not stepped and _is_sound(upper) and _is_sound(before) and now_ns > old_ns:
            drift, half = _drift(before, upper, now_ns - old_ns, drift_ratio)
            finer = _bounds(names, meetings, now_ns, drift, half)
            upper = np.minimum(upper, finer) if _is_sound(finer) else upper
    while not _is_sound(upper) and size > _MIN_WINDOW:
        size //= 2
        upper = _bounds(names, meetings.newest(size), now_ns, np.zeros(len(names)),
                        np.full(len(names), drift_ratio / 2))  # fmt: skip
    if not _is_sound(upper):
        upper = _unknown(len(names))
    upper = _with_exchanges(names, upper, exchanges, now_ns, drift_ratio)
    return Clocks(names, upper, _likely(names, meetings.newest(2 * size), now_ns), stepped)


def _likely(names: Sequence[str], meetings: Meetings, now_ns: int) -> Any:
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
        meetings = meetings.between(len(meetings) // 2, len(meetings))
    return None


def _connected_window(meetings: Meetings, num_hosts: int) -> int:
    """Return how many of the newest operations count: 100 of each group, by their size."""
    if not len(meetings):
        return 0
    return min(len(meetings), int(WINDOW * max(num_hosts / meetings.mean_hosts, 1.0)))


def _unknown(count: int) -> Any:
    upper = np.full((count, count), np.inf)
    np.fill_diagonal(upper, 0.0)
    return upper


def _bounds(names: Sequence[str], meetings: Meetings, now_ns: int, drift: Any, half: Any) -> Any:
    """Return the closed upper bounds at `now_ns`, ns; a negative diagonal is a contradiction.

    A clock that gains `drift` (within `half`) showed less before: what it showed is brought to
    `now_ns`, and what is not known of its drift widens the bound.
    """
    upper = _unknown(len(names))
    for some in _blocks(meetings):
        age, hosts = now_ns - some.times_ns[:, None], some.hosts
        starts = some.starts_ns - now_ns + drift[hosts] * age - half[hosts] * abs(age)
        ends = some.ends_ns - now_ns + drift[hosts] * age + half[hosts] * abs(age)
        block = np.ix_(hosts, hosts)
        # start_i - end_j <= theta_i - theta_j, so theta_j - theta_i <= end_j - start_i
        least = (ends[:, :, None] - starts[:, None, :]).min(0)
        upper[block] = np.minimum(upper[block], least)
    np.fill_diagonal(upper, np.minimum(np.diag(upper), 0.0))
    return _closed(upper)


def _blocks(meetings: Meetings) -> Iterator[SameHosts]:
    """Yield operations of the same hosts, some at a time."""
    for part in meetings.parts:
        size = max(1, _CELLS_AT_ONCE // len(part.hosts) ** 2)
        for begin in range(0, len(part.places), size):
            yield part.where(slice(begin, begin + size))


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
