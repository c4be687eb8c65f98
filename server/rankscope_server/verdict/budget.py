"""Where the time of a step is spent: parts that add up, of the median rank and of the culprit.

Time blocked on peers is split by what all ranks share: the shortest block among them in the same
step is what communication takes when no rank is late (the last to arrive waits least); the rest is
waiting for others.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope_server.findings.text import ms_text, percent_text

Matrix = NDArray[Any]  # ranks x steps, ms, NaN missing
PARTS: tuple[str, ...] = (
    "data", "forward", "backward", "communication", "waiting", "optimizer", "checkpoint", "other",
)  # fmt: skip
_EVEN_SHARE = 0.03  # a mean further than this from the median is said beside it
_BLOCKED = {"forward": "forward_blocked", "backward": "backward_blocked",
            "optimizer": "optimizer_blocked"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """Mean ms per step of one rank; `parts` add up to `total_ms`. `median_ms` is of its steps."""

    label: str
    rank: int | None
    total_ms: float
    parts: dict[str, float]
    median_ms: float


@dataclass(frozen=True, slots=True)
class Budget:
    """The rows and one sentence."""

    rows: tuple[BudgetRow, ...]
    text: str


def split(metrics: Mapping[str, Matrix], roles: Sequence[Hashable]) -> dict[str, Matrix]:
    """Return the parts of every cell; they add up to `step`.

    `metrics` holds "step", "data", "forward", "backward", "optimizer", "checkpoint",
    "evaluation", "blocked" and the blocked parts "forward_blocked", "backward_blocked",
    "optimizer_blocked", all ranks x steps in ms. Evaluation counts as other.
    """
    step, blocked = metrics["step"], metrics["blocked"]
    parts: dict[str, Matrix] = {"data": metrics["data"], "checkpoint": metrics["checkpoint"]}
    for phase, name in _BLOCKED.items():
        parts[phase] = np.maximum(metrics[phase] - metrics[name], 0.0)
    shared = shared_block(blocked, roles)
    parts["communication"] = np.where(np.isnan(shared), 0.0, shared)
    parts["waiting"] = np.maximum(blocked - parts["communication"], 0.0)
    known = sum(parts.values(), start=np.zeros(step.shape))
    # What no part holds; hooks overlap by microseconds, which must not make it negative.
    parts["other"] = np.maximum(step - known, 0.0)
    scale = step / np.maximum(known + parts["other"], 1e-9)
    return {name: parts[name] * scale for name in PARTS}


def shared_block(blocked: Matrix, roles: Sequence[Hashable]) -> Matrix:
    """Return the shortest block of any rank in a step; NaN for a rank that is alone in its role.

    In a pipeline all ranks of a stage may wait for a slow rank of another one.
    """
    shared = np.full(blocked.shape, np.nan)
    shortest = np.fmin.reduce(blocked, axis=0) if len(blocked) else None
    for role in dict.fromkeys(roles):
        rows = [row for row, other in enumerate(roles) if other == role]
        if len(rows) > 1:
            shared[rows] = shortest
    return shared


def budget(
    metrics: Mapping[str, Matrix],
    ranks: Sequence[int],
    roles: Sequence[Hashable],
    culprits: Sequence[int] = (),
    before: slice | None = None,
    now: slice | None = None,
    typical_ms: float | None = None,
    typical_before_ms: float | None = None,
) -> Budget:
    """Return where the steps in the columns `now` go, and went in `before`.

    The sentence names the typical step of the job, where it is given, as the other pages do.

    The median rank is a real one, that with the median of self time among those not accused, so
    that its parts are of the same steps and add up.
    """
    if metrics["step"].size == 0:
        return Budget((), "No steps yet")
    parts = split(metrics, roles)
    own = metrics["step"] - metrics["blocked"]
    now = slice(0, own.shape[1]) if now is None else now
    healthy = [row for row, rank in enumerate(ranks) if rank not in set(culprits)]
    rows: list[BudgetRow | None] = []
    if before is not None:
        row = _median_row(own[:, before], healthy)
        rows.append(_row("median rank before", None, parts, row, before))
    row = _median_row(own[:, now], healthy)
    rows.append(_row("median rank now" if before is not None else "median rank", None,
                     parts, row, now))  # fmt: skip
    for rank in culprits:
        if rank in ranks:
            rows.append(_row(f"rank {rank}", rank, parts, list(ranks).index(rank), now))
    kept = tuple(row for row in rows if row is not None)
    idle = waiting_ratio(metrics["step"][:, now], metrics["blocked"][:, now], roles)
    return Budget(kept, _sentence(kept, idle, typical_ms, typical_before_ms))


def waiting_ratio(step: Matrix, blocked: Matrix, roles: Sequence[Hashable]) -> float | None:
    """Return which share of the ranks' time was waiting for others; None where it is not known."""
    return share_of(waited(blocked, roles), step)


def waited(blocked: Matrix, roles: Sequence[Hashable]) -> Matrix:
    """Return of the time that ranks were blocked what they waited for others, not transferred."""
    waits: Matrix = np.maximum(blocked - np.nan_to_num(shared_block(blocked, roles)), 0.0)
    return waits


def share_of(part: Matrix, step: Matrix) -> float | None:
    """Return which share of the steps a part of them is, where both are known; else None."""
    total = float(np.nansum(np.where(np.isnan(part), np.nan, step)))
    return float(np.nansum(part) / total) if total else None


def _median_row(own: Matrix, rows: Sequence[int]) -> int | None:
    with np.errstate(invalid="ignore"):
        known = ~np.isnan(own)
        counts = known.sum(axis=1)
        means = np.where(known, own, 0.0).sum(axis=1) / np.maximum(counts, 1)
    usable = sorted((row for row in rows if counts[row]), key=lambda row: (means[row], row))
    return usable[len(usable) // 2] if usable else None


def _row(
    label: str, rank: int | None, parts: Mapping[str, Matrix], row: int | None, columns: slice
) -> BudgetRow | None:
    if row is None:
        return None
    cells = np.stack([parts[name][row, columns] for name in PARTS])
    cells = cells[:, ~np.isnan(cells).any(axis=0)]
    if not cells.shape[1]:
        return None
    means = cells.mean(axis=1)
    values = {name: float(mean) for name, mean in zip(PARTS, means, strict=True)}
    return BudgetRow(label, rank, float(means.sum()), values, float(np.median(cells.sum(axis=0))))


def _sentence(
    rows: Sequence[BudgetRow],
    idle: float | None,
    typical_ms: float | None,
    typical_before_ms: float | None,
) -> str:
    if not rows:
        return "No steps yet"
    median_row = next((row for row in reversed(rows) if row.rank is None), rows[0])
    largest = max(median_row.parts, key=lambda name: median_row.parts[name])
    total, median = median_row.total_ms, typical_ms or median_row.median_ms
    is_even = abs(total - median) <= _EVEN_SHARE * median
    mean = "" if is_even else f", {ms_text(total)} on average"
    text = (
        f"A step takes {ms_text(median)}{mean}; most of it, "
        f"{ms_text(median_row.parts[largest])}, is {largest}"
    )
    if idle is not None:
        text += f", and {percent_text(idle)} of the ranks' time is waiting for others"
    if rows[0].label == "median rank before":
        text += f"; before it took {ms_text(typical_before_ms or rows[0].median_ms)}"
    return text
