"""Numbers of training around an onset: losses, norms, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import sqlalchemy as sa

from rankscope_server.api.pictures.chart import WIDTH, chart_of
from rankscope_server.api.pictures.schema import FindingChart
from rankscope_server.api.pictures.subject import Maker, Subject, evenly, others_text
from rankscope_server.api.steps.queries import Array, bin_of
from rankscope_server.store import tables


@dataclass(frozen=True, slots=True)
class Number:
    """A number of training that findings rest on."""

    name: str
    title: str
    unit: str


LOSS = Number("loss", "Loss of backward()", "")
PRINTED = Number("printed_loss", "Loss as the script prints it", "")
NORM = Number("gradient_norm", "Gradient norm, reduced", "")
LOCAL_NORM = Number("gradient_norm_local", "Gradient norm before reduction", "")
_MEMORY = {
    "rss_bytes": Number("rss_bytes", "Memory of the process", "bytes"),
    "workers_rss_bytes": Number("workers_rss_bytes", "Memory of its loader workers", "bytes"),
    "cuda_allocated_bytes": Number("cuda_allocated_bytes", "GPU memory in tensors", "bytes"),
}
_FRAGMENTS = (
    Number("cuda_fragmentation_bytes", "GPU memory held for no tensor", "bytes"),
    Number("cuda_reserved_bytes", "GPU memory held by the allocator", "bytes"),
)


def numbers(*wanted: Number) -> Maker:
    """Return what draws these numbers of the ranks that a finding names."""

    def make(connection: sa.Connection, subject: Subject) -> list[FindingChart]:
        return _numbers(connection, subject, wanted, subject.steps())

    return make


def memory(connection: sa.Connection, subject: Subject) -> list[FindingChart]:
    """Draw the memory that grows, over the whole run; or that which is in fragments."""
    if subject.kind == "fragmentation":
        return _numbers(connection, subject, _FRAGMENTS, subject.steps(whole=True))
    wanted = [one for name, one in _MEMORY.items() if subject.name.startswith(f"{name}/")]
    return _numbers(connection, subject, wanted, subject.steps(whole=True))


def _numbers(
    connection: sa.Connection, subject: Subject, wanted: Sequence[Number], steps: tuple[int, int]
) -> list[FindingChart]:
    named = subject.ranks or tuple(evenly(list(subject.host_of)))[:1]
    others = [rank for rank in subject.others() if rank not in named]
    shown = [*named, *others]
    table = tables.metric.c
    first, last = steps
    size = bin_of(last - first + 1, WIDTH)
    x = np.arange(first, last + 1, size)
    found = []
    for one in wanted:
        rows = connection.execute(
            sa.select(table.rank, table.step, table.value)
            .where(
                table.run_id == subject.run_id, table.name == one.name, table.rank.in_(shown),
                table.step.between(first, last), table.attempt == subject.attempt,
            )
            .order_by(table.step)
        ).all()  # fmt: skip
        if not rows:
            continue
        lines = np.full((len(shown), len(x)), np.nan)
        place_of = {rank: place for place, rank in enumerate(shown)}
        for rank, step, value in rows:
            column = (step - first) // size
            known = np.nan if value is None else value
            old = lines[place_of[rank], column]
            lines[place_of[rank], column] = known if np.isnan(old) else max(old, known)
        if one.unit == "bytes":  # sampled: what was held last holds
            lines = _held(lines)
        # Bins in which no rank has a value are no gap: numbers are not given in each step.
        given = np.zeros(len(x), bool)
        given[np.unique([(step - first) // size for _, step, _ in rows])] = True
        found.append(
            chart_of(one.name, one.title, one.unit, "step", x[given], lines[:, given],
                   [f"rank {rank}" for rank in named], subject.onset_step,
                   others_text(len(others), len(subject.host_of) - len(named), "rank"))
        )  # fmt: skip
    return found


def _held(lines: Array) -> Array:
    """Return rows in which what is not known is the value before it."""
    place = np.where(np.isnan(lines), 0, np.arange(lines.shape[1]))
    newest = np.maximum.accumulate(place, axis=1)
    held: Array = np.take_along_axis(lines, newest, axis=1)
    return held
