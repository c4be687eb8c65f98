"""Clocks of hosts and ranks brought together, for the lanes of one step.

All see the end of a synchronising operation at nearly the same time. Bounds that hold for sure
(`observe/clocks.py`) are wider by as much as ranks come late; they serve where hosts share none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope.wire.formulas import SIGMA_PER_MAD
from rankscope.wire.schema import ENDED, FLAG_END_FROM_WAIT, ClockOffset
from rankscope_server.api.timeline.calls import Calls, operations_of
from rankscope_server.call_shapes import CallShape
from rankscope_server.findings.policy import POLICY
from rankscope_server.findings.statistics import median
from rankscope_server.findings.text import ms_text
from rankscope_server.observe.clock_table import SYNCHRONISING, ClockTable, synchronising
from rankscope_server.observe.collectives import NUMBERS as TABLE_NUMBERS
from rankscope_server.observe.collectives import Collectives
from rankscope_server.store import tables
from rankscope_server.text import plural, rank_list

Array = np.ndarray[Any, np.dtype[Any]]
_EXCHANGES_NS = 600_000_000_000  # what hosts asked the server so long before and after counts
_LEAST_ENDS = 3  # operations, to say how much ends vary
_LEAST_BAND_NS = 100_000.0
_OWN_CLOCK_NS = 20_000_000  # so far off is a clock of its own: no callback is so late
_SURE_BAND = 0.02  # of a step: times of two hosts that are known so well have an order


@dataclass(frozen=True, slots=True)
class Clocks:
    """How far the clock of each rank is ahead of the middle of all, by rank; NaN not known."""

    ahead_ns: Array
    band_ns: Array
    num_hosts: int
    odd_ranks: Sequence[int] = ()  # whose clock is not that of their host

    @property
    def shift_ns(self) -> Array:
        """Return what to take off the times of each rank."""
        return np.nan_to_num(self.ahead_ns)

    def text(self, step_ms: float, hosts: list[str]) -> tuple[str, bool]:
        """Return how sure the order of events of different hosts is, and whether it is."""
        if self.odd_ranks:
            odd = list(self.odd_ranks)
            most = float(np.max(np.abs(self.ahead_ns[odd]))) / 1e6
            return (
                f"The clock of {rank_list(odd)} is up to {ms_text(most)} off that of the others "
                "on the same host, by when operations end; the lanes are moved by that.",
                bool(np.isfinite(self.band_ns).all()),
            )
        if self.num_hosts < 2:
            return "All ranks are on one host: one clock.", True
        lost = sorted({host for host, band in zip(hosts, self.band_ns, strict=True)
                       if not np.isfinite(band)})  # fmt: skip
        if lost:
            names = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
            return (
                f"How far the clock of {names or 'some hosts'} is off is not known: where its "
                "lanes stand beside the others is as its own clock says; waits are right.",
                False,
            )
        band_ms = float(np.max(self.band_ns)) / 1e6
        most = float(np.max(np.abs(self.ahead_ns))) / 1e6
        if most <= band_ms:
            hosts_text = plural(self.num_hosts, "host")
            return (f"The clocks of {hosts_text} agree within {ms_text(band_ms)}.",
                    band_ms <= _SURE_BAND * step_ms)  # fmt: skip
        text = (
            f"The clocks of {plural(self.num_hosts, 'host')} were up to {ms_text(most)} off; lanes "
            f"are moved by that, right within {ms_text(band_ms)} of each other."
        )
        return text, band_ms <= _SURE_BAND * step_ms


def clocks_of(
    connection: sa.Connection, run_id: str, hosts: list[str], near: Calls, step: int,
    started: Array,
) -> Clocks:  # fmt: skip
    """Return how far clocks are ahead around a step; `near` are the calls of the steps around."""
    names = sorted({host for host in hosts if host})
    if len(names) < 2:
        ahead, band = np.zeros(len(hosts)), np.zeros(len(hosts))
    else:
        ahead, band = _of_hosts(connection, run_id, hosts, names, near, step, started)
    own = _beside_host(near, ahead)
    odd = np.flatnonzero(np.abs(own) > _OWN_CLOCK_NS)
    ahead[odd] += own[odd]
    band[odd] = np.fmax(band[odd], _LEAST_BAND_NS)
    return Clocks(ahead, band, len(names), odd.tolist())


def _of_hosts(
    connection: sa.Connection, run_id: str, hosts: list[str], names: list[str], near: Calls,
    step: int, started: Array,
) -> tuple[Array, Array]:  # fmt: skip
    """Return by rank how far its host is ahead, and within what, ns; NaN not known."""
    places = {name: place for place, name in enumerate(names)}
    ahead, band = _by_ends(near, hosts, places)
    if np.isnan(ahead).all():
        found = _bounds(connection, run_id, hosts, near, step, started)
        bounds = np.array([found.get(name, (np.nan, np.nan)) for name in names]) * 1e6
        ahead, band = bounds[:, 0], bounds[:, 1]
    ahead, band = np.append(ahead, np.nan), np.append(band, np.nan)
    ahead = np.where(np.isfinite(band), ahead, np.nan)
    of_rank = [places.get(host, -1) for host in hosts]
    return ahead[of_rank], band[of_rank]


def _beside_host(near: Calls, ahead: Array) -> Array:
    """Return by rank how much later it sees ends than most, on the clock of its host; 0 unknown."""
    good = near.is_one_of(SYNCHRONISING) & (near["state"] == ENDED) & (near["duration_ns"] >= 0)
    good &= (near["flags"] & FLAG_END_FROM_WAIT) == 0  # a wait that returned late is no clock
    calls = near.where(np.flatnonzero(good))
    found = np.zeros(len(ahead))
    of, first = operations_of(calls)
    if not len(first):
        return found
    base = int(calls["arrived_ns"].min())
    ended = (calls["arrived_ns"] + calls["duration_ns"] - base).astype(float)
    ended -= np.nan_to_num(ahead)[calls.rank]
    order = np.lexsort((ended, of))
    begins = np.flatnonzero(np.diff(of[order], prepend=-1))
    counts = np.diff([*begins, len(of)])
    middles = ended[order[begins + (counts - 1) // 2]]
    apart = ended - middles[of]
    apart[counts[of] < 3] = np.nan  # of two, which one is off?
    order = np.argsort(calls.rank, kind="stable")
    begins = np.flatnonzero(np.diff(calls.rank[order], prepend=-1))
    ranks = calls.rank[order[begins]].tolist()
    for rank, part in zip(ranks, np.split(apart[order], begins[1:]), strict=True):
        known = part[~np.isnan(part)]
        if len(known) >= _LEAST_ENDS:
            found[rank] = np.median(known)
    return found


def _bounds(
    connection: sa.Connection, run_id: str, hosts: list[str], near: Calls, step: int,
    started: Array,
) -> dict[str, tuple[float, float]]:  # fmt: skip
    """Return for each host how far it is ahead of the middle of all, and within what, ms."""
    table = ClockTable()
    host_of = {rank: host for rank, host in enumerate(hosts) if host}
    before = near.where(np.flatnonzero(near["step"] <= step))
    timed = synchronising(_as_collectives(before))
    if len(timed) < POLICY.warmup_steps:  # the first steps have those after them
        timed = synchronising(_as_collectives(near))
    if len(timed):
        table.add(timed, host_of)
    for record in _exchanges(connection, run_id, hosts, started):
        table.add_exchange(record)
    return table.clocks(host_of, POLICY.clock_drift_ratio).against_all()


def _by_ends(near: Calls, hosts: list[str], places: dict[str, int]) -> tuple[Array, Array]:
    """Return how far each host's clock is ahead, ns, and how much that varies; NaN not known.

    All see the end of a synchronising operation at nearly the same time: a host's first end less
    the middle of all, the median over the operations that most hosts took part in.
    """
    count = len(places)
    ahead, band = np.full(count, np.nan), np.full(count, np.nan)
    of_rank = np.array([places.get(host, -1) for host in hosts], np.int64)
    good = near.is_one_of(SYNCHRONISING) & (near["state"] == ENDED) & (near["duration_ns"] >= 0)
    calls = near.where(np.flatnonzero(good & (of_rank[near.rank] >= 0)))
    of, first = operations_of(calls)
    if not len(first):
        return ahead, band
    never = np.iinfo(np.int64).max
    ends = np.full((len(first), count), never)
    ended = calls["arrived_ns"] + calls["duration_ns"]
    np.minimum.at(ends, (of, of_rank[calls.rank]), ended)
    is_seen = ends < never
    rows = np.flatnonzero(2 * is_seen.sum(axis=1) > count)
    if len(rows) < _LEAST_ENDS:
        return ahead, band
    ends, is_seen = ends[rows], is_seen[rows]
    leads = np.where(is_seen, (ends - ends.min(axis=1, keepdims=True)).astype(float), np.nan)
    leads -= median(leads, 1)[:, None]
    ahead = median(leads, 0)
    band = np.maximum(4 * SIGMA_PER_MAD * median(np.abs(leads - ahead), 0), _LEAST_BAND_NS)
    return ahead, band


def _as_collectives(calls: Calls) -> Collectives:
    keys = np.stack([calls.group, calls.operation, calls["size_bytes"]], axis=1)
    if not len(keys):
        return Collectives(calls.rank, dict.fromkeys(TABLE_NUMBERS, calls.rank), calls.rank, [])
    distinct, codes = np.unique(keys, axis=0, return_inverse=True)
    shapes = [
        CallShape(calls.groups[group], calls.operations[operation], "", "", "", size, -1)
        for group, operation, size in distinct.tolist()
    ]
    numbers = {name: calls.numbers.get(name, calls.rank) for name in TABLE_NUMBERS}
    return Collectives(calls.rank, numbers, codes.reshape(-1), shapes)


def _exchanges(
    connection: sa.Connection, run_id: str, hosts: list[str], started: Array
) -> list[ClockOffset]:
    """Return what hosts measured against the server around a time."""
    known = started[started > 0]
    if not len(known):
        return []
    at, table = int(np.median(known)), tables.clock_offset.c
    rows = connection.execute(
        sa.select(table.host, table.time_ns, table.offset_ns, table.band_ns)
        .where(
            table.run_id == run_id, table.time_ns.between(at - _EXCHANGES_NS, at + _EXCHANGES_NS)
        )
        .order_by(table.time_ns)
    )
    wanted = set(hosts)
    return [
        ClockOffset(
            attempt=0, rank=-1, time_ns=row.time_ns, host=row.host, offset_ns=row.offset_ns,
            band_ns=row.band_ns,
        )
        for row in rows
        if row.host in wanted
    ]  # fmt: skip
