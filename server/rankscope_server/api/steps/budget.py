"""What a step consists of: reads what the pure arithmetic of `verdict.budget` needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope_server.answers import json_object
from rankscope_server.api.runs.queries import RANK_HEAD, rank_rows, role_of
from rankscope_server.api.steps.queries import (
    BASELINE_STEPS,
    WARM_UP_STEPS,
    first_step,
    load_range,
    median_step_ms,
    steps_of_many,
    typical_range,
    waiting_planes,
)
from rankscope_server.api.steps.schema import Budget, BudgetRow
from rankscope_server.ingest.step_metrics import BLOCKED_METRICS, PHASE_METRICS
from rankscope_server.verdict.budget import PARTS
from rankscope_server.verdict.budget import Budget as SplitBudget
from rankscope_server.verdict.budget import budget as split_budget

MAX_STEPS = 5_000
_METRICS = ("step", "blocked", "num_collectives", *PHASE_METRICS, *BLOCKED_METRICS)


def budget(connection: sa.Connection, run: sa.Row[Any], last: int) -> Budget:
    """Return what the last steps consist of, and those before the verdict's onset.

    Of very many ranks fewer steps.
    """
    verdict = json_object(run.verdict) or {}
    return budget_around(connection, run, last, verdict.get("onset_step"), verdict.get("ranks", []))


def budget_around(
    connection: sa.Connection, run: sa.Row[Any], last: int, onset: int | None,
    named: Sequence[int],
) -> Budget:  # fmt: skip
    """Return what the last steps consist of, and those before an onset; some ranks apart."""
    hi = run.step
    stages = {
        row.rank: role_of(row) for row in rank_rows(connection, run.run_id, run.attempt, RANK_HEAD)
    }
    most = steps_of_many(run.world_size, stages)
    lo, _ = typical_range(connection, run.run_id, hi, min(max(last, 1), MAX_STEPS, most), onset)
    planes = load_range(connection, run.run_id, _METRICS, lo, hi)
    width = planes["step"].shape[1]
    before = before_ms = None
    warm = first_step(connection, run.run_id) + WARM_UP_STEPS
    if onset is not None and onset > warm + WARM_UP_STEPS:
        first = max(warm, onset - min(BASELINE_STEPS, most))
        earlier = load_range(connection, run.run_id, _METRICS, first, onset - 1)
        planes = _beside(earlier, planes)
        before = slice(0, earlier["step"].shape[1])
        before_ms = median_step_ms(connection, run.run_id, first, onset - 1)
    planes = waiting_planes(planes)
    height = len(planes["step"])
    total = planes["step"].shape[1]
    found = split_budget(
        planes,
        range(height),
        [stages.get(rank, -1) for rank in range(height)],
        [rank for rank in named if rank < height],
        before,
        slice(total - width, total),
        median_step_ms(connection, run.run_id, lo, hi),
        before_ms,
    )
    return Budget(
        step_lo=lo,
        step_hi=hi,
        rows=[
            BudgetRow(
                label=row.label.capitalize(),
                rank=row.rank,
                total_ms=round(row.total_ms, 3),
                parts={name: round(value, 3) for name, value in row.parts.items()},
            )
            for row in found.rows
        ],
        parts=list(PARTS),
        text=_text(found, planes) + ".",
    )


def _text(found: SplitBudget, planes: dict[str, Any]) -> str:
    if not found.rows and not np.isnan(planes["step"]).all():
        return "Not known: hosts only enqueue here, and their devices were not measured"
    return found.text


def _beside(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    height = max(len(left["step"]), len(right["step"]))

    def tall(plane: Any) -> Any:
        return np.pad(plane, ((0, height - len(plane)), (0, 0)), constant_values=np.nan)

    return {
        name: np.concatenate([tall(left[name]), tall(right[name])], axis=1) for name in _METRICS
    }
