"""Sums of calls by group, operation and size class. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rankscope.wire.formulas import bus_factor
from rankscope.wire.schema import RETURNED
from rankscope_server.api.communication.calls import UNSURE, Calls, Meetings
from rankscope_server.findings.statistics import Array

_NS_PER_MS = 1e6
_MAX_NS = 1 << 62
_BEST_SHARE = 95  # percent: the bandwidth that the best twentieth reaches
LAST_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Last:
    """A rank that arrived last."""

    rank: int
    count: int
    waited_ms: float  # by the first to arrive, of each step its longest wait: calls run at once


@dataclass(slots=True)
class Row:
    """One group, operation and size class; None where it is not known."""

    group: str
    operation: str
    octave: int
    count: int
    num_open: int
    durations_ms: Array  # of calls that ended
    blocked_ms: float  # all ranks and steps together
    overlapped_ms: float | None  # in flight and not waited for, calls at once counted once
    sizes: tuple[int, int]  # least and largest bytes
    num_matched: int = 0
    algbw: float | None = None  # bytes a second, medians
    busbw: float | None = None
    busbw_best: float | None = None
    spread_p50_ms: float | None = None
    spread_p95_ms: float | None = None
    last: list[Last] = field(default_factory=list)
    num_last: int = 0  # ranks that ever arrived last
    num_unsure: int = 0  # matched collectives of which it is not known who did


Key = tuple[int, int, int]


def rows_of(calls: Calls, met: Meetings, members: Mapping[str, int]) -> list[Row]:
    """Return a row for each group, operation and size class of the calls."""
    matched = _places(met.group, met.operation, met.octave)
    rows = []
    for key, places in _places(calls.group, calls.operation, calls.octave).items():
        row = _row(calls, key, places)
        if key in matched:
            _add_meetings(row, met, matched[key], members)
        rows.append(row)
    return rows


def _places(group: Array, operation: Array, octave: Array) -> dict[Key, Array]:
    """Return the places of each (group, operation, octave)."""
    if not len(group):
        return {}
    table = np.stack([group, operation, octave])
    order = np.lexsort(table[::-1])
    table = table[:, order]
    first = np.flatnonzero(np.any(np.diff(table, axis=1, prepend=-2) != 0, axis=0))
    keys = [(int(one), int(two), int(three)) for one, two, three in table[:, first].T]
    return dict(zip(keys, np.split(order, first[1:]), strict=True))


def _row(calls: Calls, key: Key, places: Array) -> Row:
    group, operation, octave = key
    duration, blocked = (calls.numbers[name][places] for name in ("duration_ns", "blocked_ns"))
    ended = duration >= 0
    waited = np.maximum(blocked, 0)
    began = calls.numbers["arrived_ns"][places][ended]
    in_flight = in_flight_ns(calls.rank[places][ended], began, duration[ended])
    sizes = calls.numbers["size_bytes"][places]
    return Row(
        group=calls.groups[group],
        operation=calls.operations[operation],
        octave=octave,
        count=len(places),
        num_open=int((calls.numbers["state"][places] <= RETURNED).sum()),
        durations_ms=duration[ended] / _NS_PER_MS,
        blocked_ms=float(waited.sum()) / _NS_PER_MS,
        overlapped_ms=max(in_flight - int(waited.sum()), 0) / _NS_PER_MS if ended.any() else None,
        sizes=(int(sizes.min()), int(sizes.max())),
    )


def _add_meetings(row: Row, met: Meetings, at: Array, members: Mapping[str, int]) -> None:
    row.num_matched = len(at)
    spread = met.spread_ns[at] / _NS_PER_MS
    row.spread_p50_ms, row.spread_p95_ms = np.percentile(spread, (50, 95)).tolist()
    row.num_unsure = int((met.last_rank[at] == UNSURE).sum())
    every = last_of(met, at)
    row.num_last, row.last = len(every), every[:LAST_SHOWN]
    seconds, sizes = met.transfer_ns[at] / 1e9, met.size_bytes[at]
    timed = (seconds > 0) & (sizes > 0)
    if timed.any():
        speeds = sizes[timed] / seconds[timed]
        row.algbw = float(np.median(speeds))
        factor = bus_factor(row.operation, members.get(row.group, 0))
        if factor is not None:
            row.busbw = factor * row.algbw
            row.busbw_best = factor * float(np.percentile(speeds, _BEST_SHARE))


def last_of(met: Meetings, at: Array) -> list[Last]:
    """Return who arrived last in some collectives, those for whom most was waited first."""
    at = at[met.last_rank[at] != UNSURE]
    if not len(at):
        return []
    order = at[np.lexsort((met.step[at], met.last_rank[at]))]
    keys = np.stack([met.last_rank[order], met.step[order]])
    first = np.flatnonzero(np.any(np.diff(keys, axis=1, prepend=-1) != 0, axis=0))
    longest = np.maximum.reduceat(met.spread_ns[order], first) / _NS_PER_MS
    waited, counts = np.bincount(keys[0, first], longest), np.bincount(keys[0])
    ranks = np.flatnonzero(counts)
    return [
        Last(rank, int(counts[rank]), float(waited[rank]))
        for rank in ranks[np.lexsort((ranks, -waited[ranks]))].tolist()
    ]


def in_flight_ns(rank: Array, began_ns: Array, took_ns: Array) -> int:
    """Return for how long ranks had any of some calls in flight, all ranks together."""
    if not len(rank):
        return 0
    _, row = np.unique(rank, return_inverse=True)
    began = began_ns - began_ns.min()
    ended = began + took_ns
    if int(ended.max()) + 1 > _MAX_NS // (int(row.max()) + 1):
        return sum(in_flight_ns(rank[row == one], began_ns[row == one], took_ns[row == one])
                   for one in range(int(row.max()) + 1))  # fmt: skip
    # One axis of time on which each rank has a part of its own.
    shift = row * (int(ended.max()) + 1)
    order = np.argsort(began + shift, kind="stable")
    begins, ends = (began + shift)[order], np.maximum.accumulate((ended + shift)[order])
    before = np.append(begins[0], ends[:-1])
    return int(np.maximum(ends - np.maximum(begins, before), 0).sum())


def percentiles(durations_ms: Array) -> Sequence[float | None]:
    """Return p50, p95 and p99, None for no duration."""
    if not len(durations_ms):
        return None, None, None
    found: list[float] = np.percentile(durations_ms, (50, 95, 99)).tolist()
    return found
