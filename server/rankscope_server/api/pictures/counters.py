"""What the kernel and Python count in each step of a rank, from the recorded steps themselves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import sqlalchemy as sa

from rankscope.wire.chunk import RANK
from rankscope_server.api.pictures.chart import binned, chart_of
from rankscope_server.api.pictures.schema import FindingChart
from rankscope_server.api.pictures.subject import MAX_LINES, Maker, Subject, evenly, others_text
from rankscope_server.api.steps.queries import Array
from rankscope_server.store import tables
from rankscope_server.store.chunks import PLACE, decoded

_MOST_CHUNKS = 2_000


@dataclass(frozen=True, slots=True)
class Counter:
    """A column of recorded steps, or one less another; divided by `divisor` it is in `unit`."""

    column: str
    title: str
    unit: str
    source: str
    divisor: float = 1.0
    less: str = ""


GARBAGE = Counter("gc_ns", "Pauses of Python's garbage collector", "ms",
                  "gc.callbacks in the thread that trains", 1e6)  # fmt: skip
FAULTS = Counter("major_faults", "Pages read from disk", "", "the kernel's count of the thread "
                 "that trains")  # fmt: skip
OTHER_THREADS = Counter("process_cpu_ns", "Processor time of its other threads", "ms",
                        "the process's processor time less that of the thread that trains", 1e6,
                        "cpu_ns")  # fmt: skip
TAKEN_OFF = Counter("involuntary_switches", "Times that it was taken off its processor", "",
                    "the kernel's count of the thread that trains")  # fmt: skip


def counted(counter: Counter) -> Maker:
    """Return what draws a counter of the named ranks, over those of the others."""

    def make(connection: sa.Connection, subject: Subject) -> list[FindingChart]:
        peers = subject.peers()
        named, others = list(subject.ranks[:MAX_LINES]), evenly(peers)
        first, last = subject.steps()
        lines = _read(connection, subject, counter, [*named, *others], first, last)
        if not named or np.isnan(lines[: len(named)]).all():
            return []
        x, lines = binned(np.arange(first, last + 1), lines)
        return [
            chart_of(counter.column, f"{counter.title}, each step", counter.unit, "step", x, lines,
                     [f"rank {rank}" for rank in named], subject.onset_step,
                     others_text(len(others), len(peers), "rank"), source=counter.source)
        ]  # fmt: skip

    return make


def _read(
    connection: sa.Connection, subject: Subject, counter: Counter, ranks: list[int], first: int,
    last: int,
) -> Array:  # fmt: skip
    """Return ranks x steps, NaN where no recorded step is stored."""
    table = tables.chunk.c
    rows = connection.execute(
        sa.select(table.rank, *PLACE)
        .where(
            table.run_id == subject.run_id, table.kind == "steps", table.step_hi >= first,
            table.step_lo <= last, table.attempt == subject.attempt,
            sa.or_(sa.false(), *((table.rank <= rank) & (table.rank_hi >= rank) for rank in ranks)),
        )
        .order_by(table.step_hi.desc())
        .limit(_MOST_CHUNKS)
    ).all()  # fmt: skip
    found = np.full((len(ranks), last - first + 1), np.nan)
    names = frozenset({"step", counter.column, RANK} | ({counter.less} - {""}))
    row_of = np.full(max(ranks, default=-1) + 2, -1)  # the last one: of ranks beyond
    row_of[ranks] = np.arange(len(ranks))
    for row, columns in decoded(connection, rows, names):
        steps = np.asarray(columns["step"])
        owners = np.asarray(columns[RANK]) if RANK in columns else np.full(len(steps), row.rank)
        values = np.asarray(columns[counter.column]).astype(float)
        unknown = values < 0
        if counter.less:
            less = np.asarray(columns[counter.less])
            unknown |= less < 0
            values = np.maximum(values - less, 0)
        places = row_of[np.minimum(owners, len(row_of) - 1)]
        inside = (steps >= first) & (steps <= last) & (places >= 0) & ~unknown
        found[places[inside], steps[inside] - first] = values[inside] / counter.divisor
    return found
