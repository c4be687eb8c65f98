"""Steps of one attempt: one row per rank, one column per step number, in milliseconds.

Cells may come in any order and any number of times. Memory is bounded: the newest `CAPACITY`
step numbers are kept, and the first `HEAD` for ever, because they are a rank's own reference.

A rank whose collectives were not recorded in a step looks as if it had waited for no rank. So what
rests on waiting is not known (NaN) where a rank of some group counted no collective though another
one did, where none did for many steps though they do in others, and in steps that were thinned on
some ranks and whole on others: there, waits are measured in two ways. Nor where a rank says that
it has not seen its waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rankscope.wire.arrays import distinct
from rankscope.wire.chunk import Column
from rankscope.wire.schema import (
    STEP_CHECKPOINT,
    STEP_EVALUATION,
    STEP_FIRST,
    STEP_THINNED,
    STEP_WAITS_UNKNOWN,
)
from rankscope_server.findings.statistics import median
from rankscope_server.observe.rank_steps import RankSteps

CAPACITY = 4096
# Of many ranks fewer steps are kept, 150 MB of them: from 512 ranks on; and no fewer than so many.
_MOST_CELLS, _FEWEST_STEPS = 1 << 21, 1024
PAST_BLOCKS = 512  # in which the time of steps that left is kept
HEAD = 64
SILENCE = 20  # steps without any collective: ranks of a group seldom accumulate over more
_MS = 1e-6
_FIRST_COLUMNS, _FIRST_ROWS = 256, 8
_PACE_STEPS = 64  # newest ones, that say how often collectives are called
_SOME_ROWS = 64
_BLOCK = 64  # steps whose cells are stored together
SPECIAL = STEP_FIRST | STEP_CHECKPOINT | STEP_EVALUATION

Matrix: TypeAlias = NDArray[np.float32]
Vector: TypeAlias = NDArray[np.float64]
OWN_PHASES: tuple[str, ...] = ("data", "forward", "backward", "optimizer", "other")
_BLOCKED = ("forward_blocked_ns", "backward_blocked_ns", "optimizer_blocked_ns", "other_blocked_ns")
# `own` is the step without waiting for peers, saving and evaluating; phases are self time too.
# What may explain self time; -1 or nothing in the record is NaN here.
SIGNALS: dict[str, tuple[str, float]] = {
    "gc": ("gc_ns", _MS),
    "major_faults": ("major_faults", 1.0),
    "involuntary_switches": ("involuntary_switches", 1.0),
    "microbatches": ("microbatches", 1.0),
    "process_cpu": ("process_cpu_ns", _MS),
}
METRICS: tuple[str, ...] = ("own", "duration", "blocked", "cpu", "calls", *OWN_PHASES, *SIGNALS)
_BESIDE = ("started_ms", "flags")  # cells of another type
_REST_ON_WAITS = ("own", "blocked", *(phase for phase in OWN_PHASES if phase != "data"))


class Past:
    """How long the steps took that left the table: blocks of some of them, coarser the longer.

    A block is (first step, steps, ms), each two seconds or more; two are made one where many are.
    """

    def __init__(self) -> None:
        self.blocks: NDArray[np.float64] = np.zeros((0, 3))
        self._least_ms = 2_000.0

    def add(self, steps: NDArray[np.int64], times_ms: NDArray[np.float64]) -> None:
        """Take steps that leave, in their order; those whose time is not known are not counted."""
        known = ~np.isnan(times_ms)
        if not known.any():
            return
        more = np.stack([steps[known], np.ones(int(known.sum())), times_ms[known]], axis=1)
        last = self.blocks[-1:][self.blocks[-1:, 2] < self._least_ms]
        rows = np.concatenate([last, more])
        kept = self.blocks[: len(self.blocks) - len(last)]
        self.blocks = np.concatenate([kept, self._joined(rows)])
        while len(self.blocks) > PAST_BLOCKS:
            self._least_ms *= 2.0
            self.blocks = self._joined(self.blocks)

    def _joined(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return blocks of at least the least time; the last may be shorter."""
        ends = np.cumsum(rows[:, 2])
        number = ((ends - rows[:, 2]) // self._least_ms).astype(int)
        begins = np.flatnonzero(np.diff(number, prepend=-1))
        sums = np.add.reduceat(rows[:, 1:], begins, axis=0)
        joined: NDArray[np.float64] = np.column_stack([rows[begins, 0], sums])
        return joined


class StepTable:
    """The steps of one attempt. `own(...)[row_of[rank], column]`, NaN where not known."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self.row_of: dict[int, int] = {}
        self.num_steps = 0  # columns in use
        self.dropped_steps = 0  # columns that left for lack of room
        self.clean_columns = 0  # leading columns unchanged since `mark_clean`
        self.reference: Any = None  # what the derived arrays were compared with
        self._grouped: set[int] = set()  # ranks of a group of two or more
        self._hidden_columns = 0  # leading columns in which nothing is left to hide
        self._has_calls = False  # any rank of a group ever counted a collective
        self._steps = np.zeros(min(_FIRST_COLUMNS, capacity), np.int64)
        shape = (_FIRST_ROWS, len(self._steps))
        self._cells: dict[str, NDArray[Any]] = {
            name: np.full(shape, np.nan, np.float32) for name in METRICS
        }
        self._cells["started_ms"] = np.full(shape, np.nan, np.float64)
        self._cells["flags"] = np.zeros(shape, np.int32)
        self.past = Past()
        self.first_known: dict[str, NDArray[Any]] = {}  # of `deviation`: medians per row
        self._noted: dict[str, NDArray[np.bool_]] = {}  # by column, until a cell changes
        self._head: dict[str, NDArray[Any]] = {}
        self._head_steps = np.zeros(0, np.int64)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is derived; cut cells where they stay the same while steps come."""
        rows = len(self.row_of)
        edges = [0, *(np.flatnonzero(np.diff(self.steps // _BLOCK)) + 1).tolist(), self.num_steps]
        blocks = [
            (
                np.stack([self._cells[name][:rows, begin:end] for name in METRICS]),
                *(np.ascontiguousarray(self._cells[name][:rows, begin:end]) for name in _BESIDE),
            )
            for begin, end in pairwise(edges)
        ]
        head = {name: cells for name, cells in self._head.items() if name in (*METRICS, *_BESIDE)}
        changed = {"_steps": self.steps.copy(), "_head": head, "_noted": {}, "reference": None}
        return self.__dict__ | changed | {"_cells": blocks, "clean_columns": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["capacity"])  # type: ignore[misc]
        empty, room = self._cells, len(self._steps)
        self.__dict__.update(state)
        while room < self.num_steps:
            room *= 2
        shape = max(len(self.row_of), _FIRST_ROWS), room
        self._steps = np.pad(state["_steps"], (0, room - self.num_steps))
        self._cells = {
            name: np.full(shape, _blank(cells), cells.dtype) for name, cells in empty.items()
        }
        begin = 0
        for metrics, *beside in state["_cells"]:
            end = begin + metrics.shape[2]
            for name, cells in (*zip(METRICS, metrics, strict=True),
                                *zip(_BESIDE, beside, strict=True)):  # fmt: skip
                self._cells[name][: len(cells), begin:end] = cells
            begin = end

    @property
    def _most_columns(self) -> int:
        of_ranks = _MOST_CELLS // max(len(self.row_of), 1)
        return min(self.capacity, max(of_ranks, _FEWEST_STEPS))

    # --- reading -----------------------------------------------------------------------------

    @property
    def ranks(self) -> list[int]:
        """Return the rank of each row."""
        return list(self.row_of)

    @property
    def steps(self) -> NDArray[np.int64]:
        """Return the step number of each column, ascending."""
        return self._steps[: self.num_steps]

    def get(self, metric: str, first_column: int = 0) -> Matrix:
        """Return a view of one metric, ranks x steps, from `first_column` on."""
        self._hide()
        cells: Matrix = self._cells[metric][: len(self.row_of), first_column : self.num_steps]
        return cells

    def some_rows(self) -> slice:
        """Return rows that are enough for the time of a step: ranks end it together."""
        return slice(0, len(self.row_of), 1 + len(self.row_of) // _SOME_ROWS)

    def head(self, metric: str) -> Matrix:
        """Return the first `HEAD` steps of the attempt, also when the table has moved on."""
        self._hide()
        if self.dropped_steps:
            rows = self._head[metric]
            return rows[: len(self.row_of)]
        return self.get(metric)[:, :HEAD]

    def head_steps(self) -> NDArray[np.int64]:
        """Return the numbers of the steps that `head` holds."""
        steps: NDArray[np.int64] = (self._head_steps if self.dropped_steps else self.steps)[:HEAD]
        return steps

    def flags(self) -> NDArray[np.int32]:
        """Return the flags of `rankscope.wire.schema.STEP_*`, ranks x steps."""
        cells: NDArray[np.int32] = self._cells["flags"][: len(self.row_of), : self.num_steps]
        return cells

    def special(self, first_column: int = 0) -> NDArray[np.bool_]:
        """Return which columns hold a first, checkpoint or evaluation step of any rank."""
        return self._once("special", self._special)[first_column:]

    def _special(self) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = np.any(self._flags(self.flags()), axis=0)
        return found

    def head_special(self) -> NDArray[np.bool_]:
        """Return `special` for the columns of `head`."""
        found: NDArray[np.bool_] = np.any(self._flags(self.head("flags")), axis=0)
        return found

    @staticmethod
    def _flags(cells: NDArray[Any]) -> NDArray[Any]:
        return cells & SPECIAL

    def derived(self, name: str) -> Matrix:
        """Return an array of the table's shape that a detector keeps beside the cells.

        It moves with the columns; its first `clean_columns` columns are as they were left.
        """
        if name not in self._cells:
            self._cells[name] = np.full(self._cells["own"].shape, np.nan, np.float32)
        return self.get(name)

    def mark_clean(self) -> None:
        """Note that the derived arrays are up to date."""
        self.clean_columns = self.num_steps

    def mark_dirty(self) -> None:
        """Note that the derived arrays are of no use: what they rest on has changed."""
        self.clean_columns = 0

    def calls_per_second(self) -> float:
        """Return how many collectives a rank calls in the newest steps, recorded or counted."""
        first, rows = max(0, self.num_steps - _PACE_STEPS), self.some_rows()
        seconds = self.get("duration", first)[rows] / 1e3
        calls = self.get("calls", first)[rows]
        known = ~np.isnan(seconds) & ~np.isnan(calls)
        total = float(seconds[known].sum())
        return float(calls[known].sum()) / total if total > 0 else 0.0

    def is_thinned(self, first_column: int = 0) -> NDArray[np.bool_]:
        """Return in which steps of ranks collectives were counted, not recorded."""
        found: NDArray[np.bool_] = (self.flags()[:, first_column:] & STEP_THINNED) != 0
        return found

    def thinned(self, first_column: int = 0) -> NDArray[np.bool_]:
        """Return in which columns any rank's collectives were counted, not recorded."""
        return self._once("thinned", lambda: np.any(self.is_thinned(), axis=0))[first_column:]

    def seen(self, first_column: int = 0) -> NDArray[np.bool_]:
        """Return all steps but those that every rank thinned, some without seeing their waits.

        Of such a step no rank's self time need be known; were it whole on a rank, it would be.
        """
        return self._once("seen", self._seen)[first_column:]

    def _seen(self) -> NDArray[np.bool_]:
        flags, known = self.flags(), ~np.isnan(self.get("duration"))
        thinned = np.all((flags & STEP_THINNED != 0) | ~known, axis=0)
        found: NDArray[np.bool_] = ~(thinned & np.any(flags & STEP_WAITS_UNKNOWN != 0, axis=0))
        return found

    def _once(self, name: str, read: Callable[[], NDArray[np.bool_]]) -> NDArray[np.bool_]:
        """Return what is read of all cells, once until one of them changes. Not to be changed."""
        known = self._noted.get(name)
        if known is None:
            known = self._noted[name] = read()
            known.flags.writeable = False
        return known

    # --- writing -----------------------------------------------------------------------------

    def know_group(self, ranks: Iterable[int]) -> None:
        """Note the ranks of a process group: where one counts collectives, all should."""
        members = set(ranks)
        if len(members) > 1 and not members <= self._grouped:
            self._grouped |= members
            self._hidden_columns = self.clean_columns = 0

    def put(self, rank: int, columns: Mapping[str, Column]) -> None:
        """Take the steps of one rank; of a step that comes twice the later start counts."""
        self.put_all(RankSteps.of(rank, columns))

    def put_all(self, taken: RankSteps) -> None:
        """Take the steps of ranks; of a step that comes twice the later start counts."""
        steps = np.asarray(taken.columns["step"], np.int64)
        numbers = distinct(steps)[-self._most_columns :]
        keep = np.flatnonzero(steps >= numbers[0])
        cells = _cells_of(taken.columns, keep)
        self._make_columns(numbers)
        rows = taken.each(np.array([self._row(rank) for rank in taken.ranks.tolist()]))[keep]
        steps = steps[keep]
        low, high = int(steps.min()), int(steps.max())
        if len(distinct(rows * (high - low + 1) + (steps - low))) < len(keep):
            order = np.argsort(cells["started_ms"], kind="stable")  # the last one written stays
            rows, steps = rows[order], steps[order]
            cells = {name: values[order] for name, values in cells.items()}
        if self.dropped_steps:
            self._put_into(self._head, self._head_steps, rows, steps, cells)
            self._hidden_columns = min(self._hidden_columns, self.num_steps - 1)
        touched = self._put_into(self._cells, self.steps, rows, steps, cells)
        self.clean_columns = min(self.clean_columns, touched)
        self._hidden_columns = min(self._hidden_columns, touched)
        self._noted.clear()

    def _put_into(
        self,
        target: dict[str, NDArray[Any]],
        known: NDArray[np.int64],
        rows: NDArray[np.int64],
        steps: NDArray[np.int64],
        cells: dict[str, NDArray[Any]],
    ) -> int:
        """Write the cells whose step is `known`; return the first column that changed."""
        if not len(known):
            return self.num_steps
        at = np.minimum(np.searchsorted(known, steps), len(known) - 1)
        before = target["started_ms"][rows, at]
        news = (known[at] == steps) & ~(before >= cells["started_ms"])
        if not news.any():
            return self.num_steps
        rows, at = rows[news], at[news]
        for name, values in cells.items():
            target[name][rows, at] = values[news]
        return int(at.min())

    def _row(self, rank: int) -> int:
        row = self.row_of.get(rank)
        if row is None:
            row = self.row_of[rank] = len(self.row_of)
            if row >= len(self._cells["own"]):
                self._grow(rows=row)
            self.clean_columns = 0
        return row

    def _make_columns(self, wanted: NDArray[np.int64]) -> None:
        new = np.setdiff1d(wanted, self.steps, assume_unique=True)
        if self.dropped_steps and len(new):  # too late for the table, perhaps not for the head
            new = new[new > self._steps[0]]
        if not len(new):
            return
        most = self._most_columns
        room = most - self.num_steps - len(new)
        if room < 0:
            self._drop(min(self.num_steps, max(-room, most // 8)))
        while self.num_steps + len(new) > len(self._steps):
            self._grow(columns=len(self._steps))
        merged = np.concatenate([self.steps, new])
        order = np.argsort(merged, kind="stable")
        first = int(np.searchsorted(self.steps, new[0]))
        if first < self.num_steps:  # columns in between: move what comes after
            for cells in self._cells.values():
                used = cells[:, : len(merged)]
                used[:, self.num_steps :] = _blank(cells)
                used[:, first:] = used[:, order[first:]]
        self._steps[: len(merged)] = merged[order]
        self.num_steps = len(merged)
        self.clean_columns = min(self.clean_columns, first)
        self._hidden_columns = min(self._hidden_columns, first)

    def _drop(self, count: int) -> None:
        self._hide()
        if not self.dropped_steps:
            self._head = {name: cells[:, :HEAD].copy() for name, cells in self._cells.items()}
            self._head_steps = self.steps[:HEAD].copy()
        self.past.add(self.steps[:count], self._usual_times(count))
        kept = self.num_steps - count
        for cells in self._cells.values():
            cells[:, :kept] = cells[:, count : self.num_steps]
            cells[:, kept:] = _blank(cells)
        self._steps[:kept] = self._steps[count : self.num_steps]
        self.num_steps = kept
        self.dropped_steps += count
        self.clean_columns = max(0, self.clean_columns - count)
        self._hidden_columns = kept
        self._noted.clear()

    def _usual_times(self, count: int) -> NDArray[np.float64]:
        """Return how long the first steps of the table took, ms; special ones are not known."""
        times = median(self._cells["duration"][self.some_rows(), :count].astype(float), 0)
        return np.where(self.special()[:count], np.nan, times)

    def _hide(self) -> None:
        """Make what rests on waits unknown where the waits are.

        What is hidden once stays so, whatever comes later: more ranks only show more of it.
        """
        first = self._hidden_columns
        if first >= self.num_steps:
            return
        self._hidden_columns = self.num_steps
        rows = [row for rank, row in self.row_of.items() if rank in self._grouped]
        if len(rows) < 2:
            return
        if not self._has_calls and bool(
            (self._cells["calls"][rows, first : self.num_steps] > 0).any()
        ):
            self._has_calls, first = True, 0
        _hide_in(self._cells, rows, slice(max(0, first - SILENCE), self.num_steps), self._has_calls)
        if self._head:
            _hide_in(self._head, rows, slice(0, len(self._head_steps)), self._has_calls)

    def _grow(self, rows: int = 0, columns: int = 0) -> None:
        for name, cells in self._cells.items():
            self._cells[name] = np.pad(
                cells, ((0, rows), (0, columns)), constant_values=_blank(cells)
            )
        for name, cells in self._head.items():
            self._head[name] = np.pad(cells, ((0, rows), (0, 0)), constant_values=_blank(cells))
        self._steps = np.pad(self._steps, (0, columns))


def _hide_in(
    target: dict[str, NDArray[Any]], rows: list[int], columns: slice, has_calls: bool
) -> None:
    """Hide what is not known; `has_calls`: silence of all ranks means that none recorded.

    A rank that is known to have waited was not silent: remote calls are no collectives.
    """
    known = ~np.isnan(target["duration"][rows, columns])
    calls = target["calls"][rows, columns]
    none = known & (calls == 0)
    thinned = (target["flags"][rows, columns] & STEP_THINNED) != 0
    is_mixed = np.any(known & thinned, axis=0) & np.any(known & ~thinned, axis=0)
    is_called = np.any(calls > 0, axis=0)
    unseen = (target["flags"][rows, columns] & STEP_WAITS_UNKNOWN) != 0
    has_waited = np.any(target["blocked"][rows, columns] > 0, axis=0)
    is_silent = has_calls & _long_runs(~(is_called | has_waited))
    unknown = unseen | (none & (is_called | is_silent)) | is_mixed
    if unknown.any():
        at = np.ix_(rows, range(columns.start, columns.stop))
        for name in _REST_ON_WAITS:
            target[name][at] = np.where(unknown, np.nan, target[name][at])


def _long_runs(is_silent: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which columns are of at least `SILENCE` in a row that are silent."""
    edges = np.flatnonzero(np.diff(np.r_[False, is_silent, False]))
    found = np.zeros(len(is_silent), bool)
    for begin, end in edges.reshape(-1, 2).tolist():
        found[begin:end] = end - begin >= SILENCE
    return found


def _blank(cells: NDArray[Any]) -> Any:
    return 0 if cells.dtype == np.int32 else np.nan


def _cells_of(columns: Mapping[str, Column], keep: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Return the table's metrics of a chunk of steps, in milliseconds."""
    nothing = np.zeros(len(keep), np.int64)

    def ns(name: str) -> NDArray[Any]:
        values = columns.get(name)
        return nothing if values is None else np.asarray(values, np.int64)[keep]

    def ms(name: str) -> NDArray[np.float64]:
        milliseconds: NDArray[np.float64] = np.maximum(ns(name), 0) * _MS
        return milliseconds

    blocked = {name: ms(name) for name in _BLOCKED}
    total_blocked = sum(blocked.values(), start=np.zeros(len(keep)))
    duration = ns("duration_ns")
    cells: dict[str, NDArray[Any]] = {"duration": duration * _MS, "blocked": total_blocked}
    outside = ms("checkpoint_ns") + ms("evaluation_ns")
    cells["own"] = np.maximum(cells["duration"] - total_blocked - outside, 0.0)
    for phase in OWN_PHASES:
        waited = blocked.get(f"{phase}_blocked_ns", 0.0)
        cells[phase] = np.maximum(ms(f"{phase}_ns") - waited, 0.0)
    cells["calls"] = ns("num_collectives").astype(np.float64)
    cells["cpu"] = np.where(ns("cpu_ns") > 0, ns("cpu_ns") * _MS, np.nan)
    for name, (column, scale) in SIGNALS.items():
        if column in columns:
            values = ns(column)
            cells[name] = np.where(values >= 0, values * scale, np.nan)
    for name in ("own", "duration", "blocked", *OWN_PHASES):
        cells[name] = np.where(duration > 0, cells[name], np.nan)
    cells["started_ms"] = ns("started_ns") * _MS
    cells["flags"] = ns("flags").astype(np.int32)
    return cells
