"""Steps around an onset: how long they take, and when they begin by whose clock."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import sqlalchemy as sa

from rankscope_server.api.pictures.chart import WIDTH, binned, chart_of
from rankscope_server.api.pictures.schema import FindingChart
from rankscope_server.api.pictures.subject import MAX_LINES, Maker, Subject, evenly, others_text
from rankscope_server.api.steps.map import own_part, planes_of
from rankscope_server.api.steps.queries import (
    first_step,
    load_range,
    quiet,
    steps_of_many,
    warm_up_steps,
)
from rankscope_server.ingest.step_metrics import STARTED
from rankscope_server.store import tables

SOURCE = "steps as each rank measured them, by its own clock"


def of_rank(metric: str, title: str) -> Maker:
    """Return what draws a part of each step of the named ranks, over the ranks of their role."""

    def make(connection: sa.Connection, subject: Subject) -> list[FindingChart]:
        first, last = _after_warm_up(connection, subject)
        planes = load_range(
            connection, subject.run_id, planes_of(metric), first, last, subject.attempt
        )
        values = own_part(metric, planes)
        if not values.size or np.isnan(values).all():
            return []
        named = [rank for rank in subject.ranks if rank < len(values)]
        peers = [rank for rank in subject.peers() if rank < len(values)]
        others = evenly(peers)
        lines, labels = values[[*named, *others]], [f"rank {rank}" for rank in named]
        if not named:  # all are meant
            lines = np.concatenate([quiet(np.nanmax, values, axis=0)[None], values[others]])
            labels = ["the slowest rank"]
        x, lines = binned(np.arange(first, last + 1), lines)
        whom = others_text(len(others), len(peers), "rank")
        return [
            chart_of(metric, title, "ms", "step", x, lines, labels, subject.onset_step,
                     whom if named else whom.replace(" other", ""),
                     source=SOURCE, limits=subject.limits(metric))
        ]  # fmt: skip

    return make


def pace(connection: sa.Connection, subject: Subject) -> list[FindingChart]:
    """Draw how long steps take, all ranks together."""
    first, last = _after_warm_up(connection, subject)
    steps = load_range(connection, subject.run_id, ("step",), first, last, subject.attempt)["step"]
    if not steps.size or np.isnan(steps).all():
        return []
    slowest = quiet(np.nanmax, steps, axis=0)[None]
    x, lines = binned(np.arange(first, last + 1), slowest)
    return [chart_of("step", "Step time, of the slowest rank", "ms", "step", x, lines,
                   ["the job"], subject.onset_step, "", source=SOURCE,
                   limits=subject.limits("step"))]  # fmt: skip


def _after_warm_up(connection: sa.Connection, subject: Subject) -> tuple[int, int]:
    """Return the steps around the onset without the first ones, which dwarf all others."""
    first, last = subject.steps()
    first = max(first, last - steps_of_many(1, subject.host_of) + 1)
    begin = first_step(connection, subject.run_id)
    usual = begin + warm_up_steps(last - begin + 1)
    if subject.onset_step is not None:
        usual = min(usual, subject.onset_step)
    return max(first, usual), last


def clocks(connection: sa.Connection, subject: Subject) -> list[FindingChart]:
    """Draw by how much ranks begin steps later by their own clock, and what the server measured."""
    apart = set(subject.ranks) or {
        rank for rank, host in subject.host_of.items() if host in subject.hosts
    }
    named = sorted(apart)[:MAX_LINES]
    others = [rank for rank in subject.others() if rank not in apart]
    charts = _starts(connection, subject, named, others) if named and others else []
    return charts + _offsets(connection, subject)


def _starts(
    connection: sa.Connection, subject: Subject, named: Sequence[int], others: Sequence[int]
) -> list[FindingChart]:
    first, last = _after_warm_up(connection, subject)
    started = load_range(connection, subject.run_id, (STARTED,), first, last, subject.attempt)[
        STARTED
    ]
    rows = [*named, *(rank for rank in others if rank < len(started))]
    if len(rows) == len(named) or max(named) >= len(started):
        return []
    times = started[rows].astype(float) / 1e6
    times[started[rows] == 0] = np.nan
    ahead = times - quiet(np.nanmedian, times[len(named) :], axis=0)
    x, lines = binned(np.arange(first, last + 1), ahead)
    title = "When a step begins by a rank's clock, against the others"
    return [
        chart_of("started", title, "ms", "step", x, lines, [f"rank {rank}" for rank in named],
                 subject.onset_step,
                 others_text(len(others), len(subject.host_of) - len(named), "rank"),
                 source="when each rank says that its steps began")
    ]  # fmt: skip


def _offsets(connection: sa.Connection, subject: Subject) -> list[FindingChart]:
    """Draw how far the host's clock is ahead of the server's, and within which band."""
    if len(subject.hosts) != 1 or subject.ranks:
        return []
    host, table = subject.hosts[0], tables.clock_offset.c
    rows = connection.execute(
        sa.select(table.time_ns, table.offset_ns, table.band_ns)
        .where(table.run_id == subject.run_id, table.host == host)
        .order_by(table.time_ns.desc())
        .limit(WIDTH)
    ).all()[::-1]
    if not rows:
        return []
    times, offset, band = (np.array([row[i] for row in rows], float) / 1e6 for i in range(3))
    lines = np.stack([-offset, -offset - band, -offset + band])
    onset = None if subject.onset_ns is None else subject.onset_ns / 1e6
    title = f"Clock of {host}, ahead of the server's"
    return [
        chart_of("offset", title, "ms", "time", times, lines, [host], onset,
                 "where it surely lies", source="round trips between collector and server; "
                 "times by the host's clock")
    ]  # fmt: skip
