"""How old gradients were when they were applied, as scripts recorded it."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from rankscope_server.api.parallelism.schema import Staleness, StaleRank
from rankscope_server.diagnose.parameter_server.ages import ages_of
from rankscope_server.observe.version_table import BOUND, NAMES, VersionTable
from rankscope_server.store import tables
from rankscope_server.text import plural

MAX_STEPS = 500  # the newest
MAX_GRADIENTS = 50_000


def staleness(connection: sa.Connection, run: sa.Row[Any]) -> Staleness | None:
    """Return the ages of the newest gradients; None where no rank recorded versions."""
    metric = tables.metric.c
    of_run = (metric.run_id == run.run_id, metric.attempt == run.attempt)
    first = sa.select(metric.step).where(*of_run, metric.name == NAMES[0]).limit(1)
    if connection.scalar(first) is None:
        return None
    rows = connection.execute(
        sa.select(metric.rank, metric.step, metric.name, metric.value)
        .where(*of_run, metric.name.in_((*NAMES, BOUND)), metric.value.is_not(None))
        .where(metric.step > run.step - MAX_STEPS)
        .limit(MAX_GRADIENTS * (len(NAMES) + 1))
    )
    table = VersionTable()
    for rank, step, name, value in rows:
        table.put(rank, step, {name: value})
    found = [
        StaleRank(
            rank=rank, num_gradients=len(ages.ages), p50=ages.p50, p95=ages.p95, most=ages.most,
            mean=ages.mean, num_mismatched=ages.mismatches,
        )
        for rank in sorted(table.rows) if (ages := ages_of(table.rows[rank])) is not None
    ]  # fmt: skip
    if not found:
        return None
    bound = max(table.bound.values(), default=None)
    return Staleness(text=_text(found, bound), bound=bound, ranks=found)


def _text(ranks: list[StaleRank], bound: int | None) -> str:
    """Return how old gradients are, and how old the job lets them be."""
    oldest = max(ranks, key=lambda one: one.most)
    text = (
        f"Half of the gradients are applied at most {plural(max(r.p50 for r in ranks), 'version')} "
        f"late; the oldest, of rank {oldest.rank}, {plural(oldest.most, 'version')}"
    )
    if bound is None:
        return text
    return f"{text}; {'no bound is set' if bound < 0 else f'the bound is {bound}'}"
