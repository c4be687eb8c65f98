"""What is stored of one step: times of phases, its operations, and clocks brought together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope.wire.backends import is_of_device
from rankscope.wire.formulas import SIGMA_PER_MAD
from rankscope.wire.schema import ENDED, ClockOffset
from rankscope_server.api.ranks.chunks import Codes, Part, Wanted, choose, read
from rankscope_server.api.ranks.collectives import Group, groups_of
from rankscope_server.api.ranks.sums import steps_run_again
from rankscope_server.api.runs.queries import rank_rows
from rankscope_server.api.steps.queries import load_range, missing_plane
from rankscope_server.api.timeline.calls import NUMBERS, Calls, no_calls, operations_of
from rankscope_server.call_shapes import CallShape
from rankscope_server.findings.policy import POLICY
from rankscope_server.findings.statistics import median
from rankscope_server.findings.text import ms_text
from rankscope_server.ingest.step_metrics import FLOAT_METRICS, STARTED
from rankscope_server.observe.clock_table import SYNCHRONISING, ClockTable, synchronising
from rankscope_server.observe.collectives import NUMBERS as TABLE_NUMBERS
from rankscope_server.observe.collectives import Collectives
from rankscope_server.store import tables
from rankscope_server.text import plural

Array = np.ndarray[Any, np.dtype[Any]]
_COLUMNS = ("rank", "host", "stage", "num_stages", "backend")
_NAMES = frozenset((*NUMBERS, "group", "operation"))
# Clocks are aligned by the operations before a step, transfers compared with those around it.
_NEAR_STEPS, _NEAR_CELLS = 32, 20_000  # steps to each side; ranks by steps
_EXCHANGES_NS = 600_000_000_000  # what hosts asked the server so long before and after counts
_LEAST_ENDS = 3  # operations, to say how much ends vary
_LEAST_BAND_NS = 100_000.0
_SURE_BAND = 0.02  # of a step: times of two hosts that are known so well have an order


@dataclass(frozen=True, slots=True)
class Place:
    """What one rank is."""

    host: str
    stage: int  # -1 none
    is_piped: bool  # it holds one stage of a pipeline of several
    is_on_device: bool


@dataclass(frozen=True, slots=True)
class Clocks:
    """How far the clock of each rank is ahead of the middle of all, by rank; NaN not known."""

    ahead_ns: Array
    band_ns: Array
    num_hosts: int

    @property
    def shift_ns(self) -> Array:
        """Return what to take off the times of each rank."""
        return np.nan_to_num(self.ahead_ns)

    def text(self, step_ms: float, hosts: list[str]) -> tuple[str, bool]:
        """Return how sure the order of events of different hosts is, and whether it is."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One step as it is stored. Arrays are by rank."""

    step: int
    places: list[Place]
    cells: dict[str, Array]  # metric -> ms; NaN not known; `STARTED` in ns of the rank's clock
    calls: Calls
    near: Calls  # of the steps around it, too
    clocks: Clocks
    groups: dict[str, Group]
    attempt: int
    num_again: int  # calls of the step that a later attempt made again
    is_cut: bool  # there are more calls than one answer reads

    @property
    def height(self) -> int:
        """Return how many ranks there are."""
        return len(self.places)

    @property
    def hosts(self) -> list[str]:
        """Return the host of each rank."""
        return [place.host for place in self.places]

    @property
    def started_ns(self) -> Array:
        """Return when each rank began the step, on the one clock; 0 not known."""
        started = self.cells[STARTED]
        shift = np.round(self.clocks.shift_ns).astype(np.int64)
        began: Array = np.where(started > 0, started - shift, 0)
        return began


def read_step(connection: sa.Connection, run: sa.Row[Any], step: int) -> Recorded:
    """Return all that is stored of a step, of ranks that ran it twice the later."""
    rows = {row.rank: row for row in rank_rows(connection, run.run_id, run.attempt, _COLUMNS)}
    planes = load_range(connection, run.run_id, (*FLOAT_METRICS, STARTED), step, step)
    height = max([run.world_size, len(planes["step"]), *(rank + 1 for rank in rows)])
    cells = {
        name: np.concatenate([plane[:, 0], missing_plane(name, height - len(plane), 1)[:, 0]])
        for name, plane in planes.items()
    }
    num_stages = len({row.stage for row in rows.values() if row.stage >= 0})
    places = [_place(rows.get(rank), num_stages) for rank in range(height)]
    reach = max(2, min(_NEAR_STEPS, _NEAR_CELLS // max(height, 1)))
    near, attempt, num_again, is_cut = _read_calls(connection, run, step, reach)
    near = near.where(np.flatnonzero(near.rank < height))
    hosts = [place.host for place in places]
    return Recorded(
        step=step, places=places, cells=cells,
        calls=near.where(np.flatnonzero(near["step"] == step)), near=near,
        clocks=_clocks(connection, run.run_id, hosts, near, step, cells[STARTED]),
        groups=groups_of(connection, run, attempt), attempt=attempt, num_again=num_again,
        is_cut=is_cut,
    )  # fmt: skip


def _place(row: Any, num_stages: int) -> Place:
    """Return what a rank is; a rank of several stages says one of them, so there are fewer."""
    if row is None:
        return Place("", -1, is_piped=False, is_on_device=False)
    is_piped = row.stage >= 0 and row.num_stages == num_stages > 1
    return Place(row.host, row.stage, is_piped, is_of_device(row.backend))


def _read_calls(
    connection: sa.Connection, run: sa.Row[Any], step: int, reach: int
) -> tuple[Calls, int, int, bool]:
    """Return the calls of some steps, the attempt of this one, what was run again, if cut."""
    chosen = choose(connection, Wanted(run.run_id, lo=step, hi=step))
    again = steps_run_again(connection, run.run_id)
    parts, num_again, attempts = [], 0, {run.attempt if not chosen.ids else 0}
    for part in read(connection, chosen.ids, _NAMES):
        steps = part.numbers["step"]
        inside = np.abs(steps - step) <= reach
        for lo, hi in again.get(part.attempt, ()):
            is_again = inside & (steps >= lo) & (steps <= hi)
            num_again += int((is_again & (steps == step)).sum())
            inside &= ~is_again
        if inside.any():
            parts.append((part, np.flatnonzero(inside)))
            attempts.add(part.attempt)
    return _joined(parts), max(attempts), num_again, chosen.is_cut


def _joined(parts: Iterable[tuple[Part, Array]]) -> Calls:
    groups, operations = Codes(), Codes()
    columns: dict[str, list[Array]] = {}
    for part, rows in parts:
        found = {name: part.numbers[name][rows].astype(np.int64) for name in NUMBERS}
        found["rank"] = np.full(len(rows), part.rank)
        found["group"] = groups.of(part.words["group"], rows)
        found["operation"] = operations.of(part.words["operation"], rows)
        for name, column in found.items():
            columns.setdefault(name, []).append(column)
    if not columns:
        return no_calls()
    joined = {name: np.concatenate(column) for name, column in columns.items()}
    order = np.lexsort((joined["arrived_ns"], joined["rank"]))
    joined = {name: column[order] for name, column in joined.items()}
    return Calls(
        joined.pop("rank"), joined.pop("group"), joined.pop("operation"), joined, groups.words,
        operations.words,
    )  # fmt: skip


# --- clocks ----------------------------------------------------------------------------------


def _clocks(
    connection: sa.Connection, run_id: str, hosts: list[str], near: Calls, step: int,
    started: Array,
) -> Clocks:  # fmt: skip
    names = sorted({host for host in hosts if host})
    if len(names) < 2:
        zero = np.zeros(len(hosts))
        return Clocks(zero, zero, len(names))
    places = {name: place for place, name in enumerate(names)}
    ahead, band = _by_ends(near, hosts, places)
    if np.isnan(ahead).all():  # bounds that hold for sure are wider by how late ranks come
        found = _bounds(connection, run_id, hosts, near, step, started)
        bounds = np.array([found.get(name, (np.nan, np.nan)) for name in names]) * 1e6
        ahead, band = bounds[:, 0], bounds[:, 1]
    ahead, band = np.append(ahead, np.nan), np.append(band, np.nan)
    ahead = np.where(np.isfinite(band), ahead, np.nan)
    of_rank = [places.get(host, -1) for host in hosts]
    return Clocks(ahead[of_rank], band[of_rank], len(names))


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
