"""What is stored of one step: times of phases, its operations, and clocks brought together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope.wire.backends import is_of_device
from rankscope.wire.chunk import RANK
from rankscope_server.api.ranks.chunks import Codes, Part, Wanted, choose, read
from rankscope_server.api.ranks.collectives import Group, groups_of
from rankscope_server.api.ranks.sums import steps_run_again
from rankscope_server.api.runs.queries import rank_rows
from rankscope_server.api.steps.queries import load_range, missing_plane
from rankscope_server.api.timeline.calls import NUMBERS, Calls, no_calls
from rankscope_server.api.timeline.clocks import Clocks, clocks_of
from rankscope_server.ingest.step_metrics import FLOAT_METRICS, STARTED
from rankscope_server.store import tables

Array = np.ndarray[Any, np.dtype[Any]]
_COLUMNS = ("rank", "host", "stage", "num_stages", "backend")
_NAMES = frozenset((*NUMBERS, "group", "operation"))
# Clocks are aligned, and transfers compared, by the operations around a step.
_NEAR_STEPS, _NEAR_CELLS = 32, 20_000  # steps to each side; ranks by steps
_LEAST_NEAR, _MAX_MORE = 8, 2_048  # steps; parts that are read to have as many


@dataclass(frozen=True, slots=True)
class Place:
    """What one rank is."""

    host: str
    stage: int  # -1 none
    is_piped: bool  # it holds one stage of a pipeline of several
    is_on_device: bool


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
    near, num_again, is_cut = _read_calls(connection, run, step, reach)
    attempt = _attempt_of(connection, run, step)
    near = near.where(np.flatnonzero(near.rank < height))
    hosts = [place.host for place in places]
    return Recorded(
        step=step, places=places, cells=cells,
        calls=near.where(np.flatnonzero(near["step"] == step)), near=near,
        clocks=clocks_of(connection, run.run_id, hosts, near, step, cells[STARTED]),
        groups=groups_of(connection, run, attempt), attempt=attempt, num_again=num_again,
        is_cut=is_cut,
    )  # fmt: skip


def _place(row: Any, num_stages: int) -> Place:
    """Return what a rank is; a rank of several stages says one of them, so there are fewer."""
    if row is None:
        return Place("", -1, is_piped=False, is_on_device=False)
    is_piped = row.stage >= 0 and row.num_stages == num_stages > 1
    return Place(row.host, row.stage, is_piped, is_of_device(row.backend))


def _attempt_of(connection: sa.Connection, run: sa.Row[Any], step: int) -> int:
    """Return the newest attempt that ran a step; that of the run where none did."""
    table = tables.attempt.c
    newest = connection.scalar(
        sa.select(sa.func.max(table.attempt)).where(
            table.run_id == run.run_id, table.step_lo <= step, table.step_hi >= step
        )
    )
    return int(run.attempt if newest is None else newest)


def _read_calls(
    connection: sa.Connection, run: sa.Row[Any], step: int, reach: int
) -> tuple[Calls, int, bool]:
    """Return the calls of some steps, how many of this one were made again later, and if cut.

    The parts that hold this step hold others beside it; where these are few, more are read.
    """
    again = steps_run_again(connection, run.run_id)
    parts: list[tuple[Part, Array]] = []
    seen, num_again = {step}, 0

    def take(ids: list[int]) -> None:
        nonlocal num_again
        for part in read(connection, ids, _NAMES):
            steps = part.numbers["step"]
            inside = np.abs(steps - step) <= reach
            for lo, hi in again.get(part.attempt, ()):
                is_again = inside & (steps >= lo) & (steps <= hi)
                num_again += int((is_again & (steps == step)).sum())
                inside &= ~is_again
            if inside.any():
                parts.append((part, np.flatnonzero(inside)))
                seen.update(np.unique(steps[inside]).tolist())

    chosen = choose(connection, Wanted(run.run_id, lo=step, hi=step))
    take(chosen.ids)
    if chosen.ids and len(seen) < _LEAST_NEAR:
        wanted = Wanted(run.run_id, lo=max(step - _LEAST_NEAR, 1), hi=step + 2)
        read_already = set(chosen.ids)
        more = [one for one in choose(connection, wanted).ids if one not in read_already]
        take(more[:_MAX_MORE])
    return _joined(parts), num_again, chosen.is_cut


def _joined(parts: Iterable[tuple[Part, Array]]) -> Calls:
    groups, operations = Codes(), Codes()
    columns: dict[str, list[Array]] = {}
    for part, rows in parts:
        found = {name: part.numbers[name][rows].astype(np.int64) for name in NUMBERS}
        found["rank"] = part.numbers[RANK][rows]
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
