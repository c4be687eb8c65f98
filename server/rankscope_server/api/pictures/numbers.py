"""Numbers of training around an onset: losses, norms, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import sqlalchemy as sa

from rankscope_server.api.pictures.chart import WIDTH, chart_of
from rankscope_server.api.pictures.schema import FindingChart, PictureLimit
from rankscope_server.api.pictures.subject import Maker, Subject, evenly, others_text
from rankscope_server.api.steps.queries import Array, bin_of, quiet
from rankscope_server.diagnose.parameter_server.ages import ages_of
from rankscope_server.observe.version_table import BOUND, NAMES, VersionTable
from rankscope_server.store import tables

MAX_VALUES = 200_000  # of one picture


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
LEARNING_RATE = Number("learning_rate", "Learning rate", "")
TOKENS = Number("tokens", "Tokens of the rank's batches", "tokens")
_MEMORY = {
    "rss_bytes": Number("rss_bytes", "Memory of the process", "bytes"),
    "workers_rss_bytes": Number("workers_rss_bytes", "Memory of its loader workers", "bytes"),
    "cuda_allocated_bytes": Number("cuda_allocated_bytes", "GPU memory in tensors", "bytes"),
}
SOURCE = "what the rank recorded in each step"
_HELD = Number("cuda_reserved_bytes", "GPU memory held by the allocator", "bytes")
_OF_ALLOCATOR = {
    "fragmentation": (
        Number("cuda_fragmentation_bytes", "GPU memory held for no tensor", "bytes"), _HELD,
    ),
    "unused_memory": (_HELD, Number("cuda_peak_bytes", "Most GPU memory in tensors", "bytes")),
}  # fmt: skip


def numbers(*wanted: Number) -> Maker:
    """Return what draws these numbers of the ranks that a finding names."""

    def make(connection: sa.Connection, subject: Subject) -> list[FindingChart]:
        return _numbers(connection, subject, wanted, subject.steps())

    return make


def memory(connection: sa.Connection, subject: Subject) -> list[FindingChart]:
    """Draw the memory that grows, or is in fragments or not used, over the whole run."""
    if subject.kind in _OF_ALLOCATOR:
        held = _OF_ALLOCATOR[subject.kind]
        return _numbers(connection, subject, held, subject.steps(whole=True))
    wanted = [one for name, one in _MEMORY.items() if subject.name.startswith(f"{name}/")]
    return _numbers(connection, subject, wanted, subject.steps(whole=True))


def _numbers(
    connection: sa.Connection, subject: Subject, wanted: Sequence[Number], steps: tuple[int, int]
) -> list[FindingChart]:
    named = subject.ranks or tuple(subject.host_of if len(subject.host_of) == 1 else ())
    others = [rank for rank in subject.others() if rank not in named]
    shown = [*named, *others]
    whom = others_text(len(others), len(subject.host_of) - len(named), "rank")
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
        if not named:  # all are meant
            lines = np.concatenate([quiet(np.nanmax, lines, axis=0)[None], lines])
        # Bins in which no rank has a value are no gap: numbers are not given in each step.
        given = np.zeros(len(x), bool)
        given[np.unique([(step - first) // size for _, step, _ in rows])] = True
        found.append(
            chart_of(one.name, one.title, one.unit, "step", x[given], lines[:, given],
                   [f"rank {rank}" for rank in named] or ["the largest of them"],
                   subject.onset_step, whom if named else whom.replace(" other", ""),
                   source=SOURCE, limits=subject.limits(one.name))
        )  # fmt: skip
    return found


def ages(connection: sa.Connection, subject: Subject) -> list[FindingChart]:
    """Draw how many versions late the gradients of workers are applied, and the declared bound."""
    first, last = subject.steps()
    table = versions_of(connection, subject, (*NAMES, BOUND), (first, last))
    found = {rank: ages_of(rows) for rank, rows in table.rows.items()}
    known = {rank: one for rank, one in found.items() if one is not None}
    worst = sorted(known, key=lambda rank: -known[rank].mean)
    named = [rank for rank in subject.ranks or worst[:1] if rank in known]
    if not named:
        return []
    others = evenly([rank for rank in known if rank not in named])
    x = np.arange(first, last + 1)
    lines = np.full((len(named) + len(others), len(x)), np.nan)
    for row, rank in enumerate((*named, *others)):
        lines[row, known[rank].steps - first] = known[rank].ages
    given = ~np.isnan(lines).all(axis=0)
    size = bin_of(int(given.sum()), WIDTH)
    starts = np.arange(0, int(given.sum()), size)
    bound = max(table.bound.values(), default=-1)
    return [
        chart_of(
            "age", "Age of a gradient when it is applied", "versions", "step", x[given][starts],
            np.fmax.reduceat(lines[:, given], starts, axis=1), [f"rank {rank}" for rank in named],
            subject.onset_step, others_text(len(others), len(known) - len(named), "rank"),
            source="versions of the parameters that the script recorded",
            limits=[PictureLimit(label="the declared bound", value=bound)] if bound >= 0 else [],
        )
    ]  # fmt: skip


def versions_of(
    connection: sa.Connection, subject: Subject, names: Sequence[str], steps: tuple[int, int]
) -> VersionTable:
    """Return these numbers of all ranks as a table of versions and shards."""
    metric, table = tables.metric.c, VersionTable()
    rows = connection.execute(
        sa.select(metric.rank, metric.step, metric.name, metric.value)
        .where(
            metric.run_id == subject.run_id, metric.attempt == subject.attempt,
            metric.name.in_(names), metric.value.is_not(None), metric.step.between(*steps),
        )
        .limit(MAX_VALUES)
    )  # fmt: skip
    for rank, step, name, value in rows:
        table.put(rank, step, {name: value})
    return table


def _held(lines: Array) -> Array:
    """Return rows in which what is not known is the value before it."""
    place = np.where(np.isnan(lines), 0, np.arange(lines.shape[1]))
    newest = np.maximum.accumulate(place, axis=1)
    held: Array = np.take_along_axis(lines, newest, axis=1)
    return held
