"""Sentences about a map: what its cells are compared with, which rank is worst, what is missing."""

from __future__ import annotations

import numpy as np

from rankscope_server.api.steps.cells import MOST_USUAL, USUAL, Array, Held, Plane, Reference
from rankscope_server.api.steps.queries import quiet
from rankscope_server.api.steps.schema import Usual
from rankscope_server.findings.text import percent_text
from rankscope_server.ingest.step_metrics import DEVICE_METRICS
from rankscope_server.text import duration_text, plural

RATIO_METRICS = ("own_work", "forward", "backward")
MS_METRICS = ("step", "data", "optimizer", "blocked")


def reference_text(metric: str, kinds: set[Reference]) -> str:
    """Return what the cells are compared with."""
    if metric in MS_METRICS:
        return "in milliseconds, not compared"
    if kinds == {"peers"}:
        return "against the median of the ranks with the same role in the same step"
    if kinds == {"own"}:
        return "fewer than 4 ranks share a role: each against its own median over early steps"
    if kinds:
        return "against the median of the same role; roles of fewer than 4 ranks against themselves"
    return ""


def map_text(
    metric: str,
    plane: Plane,
    on_device: Array,
    missing: Array,
    held: Held,
    warm_up: tuple[int, int],
    usual: Usual | None,
) -> str:
    """Return which rank is worst where one is unusual, and what is missing.

    `warm_up`: its columns, its last step.
    """
    if not plane.present.any():
        if metric in DEVICE_METRICS and on_device.any():
            return "Not known: hosts only enqueue here, and their devices were not measured."
        return "No step data in this range."
    silent = int((plane.present.sum(axis=1) == 0).sum())
    tail = f" {plural(silent, 'rank')} sent no step here." if silent else ""
    if not silent and missing.any():
        tail = f" {percent_text(float(missing.mean() / 255))} of the cells are missing."
    if held.num_measured < held.num_held:
        each = round(held.num_held / max(held.num_measured, 1))
        tail = f" Devices were measured in one of about {each} steps.{tail}"
    columns, last = warm_up
    worst = quiet(np.nanmax, plane.worst[:, columns:], axis=1)
    if columns and not np.isnan(worst).all():
        after = f" after the warm-up, from step {last + 1:,}"
    else:
        after = ""
        worst = quiet(np.nanmax, plane.worst, axis=1)
    rank = int(np.nanargmax(worst))
    if metric in RATIO_METRICS:
        low, high = (usual.lo, usual.hi) if usual is not None else (1.0, 1.0)
        low = max(min(low, USUAL[0]), 1 / MOST_USUAL)
        high = min(max(high, USUAL[1]), MOST_USUAL)
        if worst[rank] <= high:
            return (
                f"No cell is beyond what is usual, {percent_text(low - 1)} to "
                f"+{percent_text(high - 1)}{after}.{tail}"
            )
        return f"Rank {rank} reaches {worst[rank]:.2f} times its reference{after}.{tail}"
    return f"Rank {rank} has the longest{after}: {duration_text(float(worst[rank]))}.{tail}"
