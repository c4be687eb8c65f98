"""Earlier runs of the same job, as the regression detector compares with them.

The same job: the same command, world size and GPU model. Read from the rollup of steps, so that
no run is decoded again.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope.wire.schema import STEP_CHECKPOINT, STEP_EVALUATION, STEP_FIRST, STEP_WAITS_UNKNOWN
from rankscope_server.findings.policy import POLICY, Policy
from rankscope_server.findings.statistics import median
from rankscope_server.observe.baseline import MAX_TIMES, RunSummary
from rankscope_server.store import tables
from rankscope_server.store.packing import unpack
from rankscope_server.store.tiles import read_blocks

_SPECIAL = STEP_FIRST | STEP_CHECKPOINT | STEP_EVALUATION
_METRICS = (
    "step", "blocked", "data", "forward", "backward", "optimizer", "other", "flags",
    "forward_blocked", "backward_blocked", "optimizer_blocked", "other_blocked",
)  # fmt: skip
_OWN = ("forward", "backward", "optimizer", "other")
Array = np.ndarray[Any, np.dtype[Any]]


def earlier_runs(
    connection: sa.Connection, run_id: str, policy: Policy = POLICY
) -> tuple[RunSummary, ...]:
    """Return the newest earlier runs of the same job, oldest first."""
    table = tables.run.c
    mine = connection.execute(
        sa.select(table.command, table.world_size, table.started_ns, table.project).where(
            table.run_id == run_id
        )
    ).first()
    if mine is None or mine.command == "[]":
        return ()
    rows = connection.execute(
        sa.select(table.run_id, table.attempt)
        .where(
            table.command == mine.command, table.world_size == mine.world_size,
            table.started_ns < mine.started_ns, table.run_id != run_id,
            table.project == mine.project,
        )
        .order_by(table.started_ns.desc())
        .limit(policy.baseline_runs)
    ).all()  # fmt: skip
    model = _facts(connection, run_id, None).get("gpu.model", "")
    found = []
    for row in reversed(rows):
        facts = _facts(connection, row.run_id, row.attempt)
        if model and facts.get("gpu.model", model) != model:
            continue
        summary = _summary(connection, row.run_id, facts, policy)
        if summary is not None:
            found.append(summary)
    return tuple(found)


def _facts(connection: sa.Connection, run_id: str, attempt: int | None) -> dict[str, str]:
    """Return the environment of one rank of a run."""
    table = tables.environment.c
    query = sa.select(table.facts).where(table.run_id == run_id, table.rank >= 0)
    if attempt is not None:
        query = query.where(table.attempt == attempt)
    packed = connection.scalar(query.order_by(table.attempt.desc(), table.rank).limit(1))
    facts: dict[str, str] = json.loads(unpack(packed)) if packed else {}
    return facts


def _summary(
    connection: sa.Connection, run_id: str, facts: dict[str, str], policy: Policy
) -> RunSummary | None:
    cells = _cells(connection, run_id)
    if not cells:
        return None
    step = np.where(cells["step"] > 0, cells["step"], np.nan)
    times = median(step, 0)
    flags = np.nan_to_num(np.nanmax(np.nan_to_num(cells["flags"]), axis=0)).astype(int)
    special = (flags & _SPECIAL) != 0
    if special.mean() > 0.5:
        special[:] = False
    good = np.flatnonzero(~np.isnan(times) & ~special)
    good = good[policy.warmup_max_steps :][-MAX_TIMES:]
    if len(good) < policy.steady_steps:
        return None
    own = {name: cells[name] - np.nan_to_num(cells[f"{name}_blocked"]) for name in _OWN}
    parts = own | {"data": cells["data"], "blocked": cells["blocked"]}
    seen = good[(flags[good] & STEP_WAITS_UNKNOWN) == 0]
    if not len(seen):
        return None
    phases = {}
    if not np.isnan(cells["blocked"][:, seen][~np.isnan(step[:, seen])]).any():  # else samples
        phases = {
            name: float(np.nanmean(median(values[:, seen], 0))) for name, values in parts.items()
        }
    recent = times[good]
    return RunSummary(run_id, (), float(np.median(recent)), phases, recent, facts)


def _cells(connection: sa.Connection, run_id: str) -> dict[str, Array]:
    """Return the newest steps of a run, ranks x steps by metric."""
    table = tables.run.c
    last = int(connection.scalar(sa.select(table.step).where(table.run_id == run_id)) or 0)
    blocks = [
        planes
        for _, planes in read_blocks(connection, run_id, _METRICS, max(0, last - MAX_TIMES), last)
    ]
    if not blocks:
        return {}
    ranks = max(len(planes["step"]) for planes in blocks)
    return {
        name: np.concatenate([_padded(planes[name], ranks) for planes in blocks], axis=1)
        for name in _METRICS
    }


def _padded(tile: Array, ranks: int) -> Array:
    missing = ((0, ranks - len(tile)), (0, 0))
    return np.pad(tile.astype(float), missing, constant_values=np.nan)
