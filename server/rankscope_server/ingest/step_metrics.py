"""The metrics of steps: from the columns of a chunk, and from what a device measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from rankscope.wire.backends import HOST_WAITS_RATIO
from rankscope.wire.chunk import Column
from rankscope.wire.metric_names import GPU_SECONDS, GPU_WAIT_SECONDS
from rankscope.wire.schema import STEP_WAITS_UNKNOWN

BLOCK_STEPS = 64
MAX_BLOCKS_PER_CHUNK = 512
Array = np.ndarray[Any, np.dtype[Any]]
_MS = 1e-6
PHASE_METRICS = ("data", "forward", "backward", "optimizer", "checkpoint", "evaluation", "other")
BLOCKED_METRICS = ("forward_blocked", "backward_blocked", "optimizer_blocked", "other_blocked")
# In milliseconds: `own_work` is the step without waiting for peers, `blocked` is that waiting.
FLOAT_METRICS = (
    "own_work", "step", "blocked", "cpu", *PHASE_METRICS, *BLOCKED_METRICS,
    "microbatches", "num_collectives", "flags",
)  # fmt: skip
_DURATIONS = {"step": "duration_ns"} | {
    name: f"{name}_ns" for name in ("cpu", *PHASE_METRICS, *BLOCKED_METRICS)
}
_BLOCKED_ROWS = [list(_DURATIONS).index(name) for name in BLOCKED_METRICS]
# What only its device knows of a rank whose host enqueues what the device does.
DEVICE_METRICS = ("own_work", "blocked", *PHASE_METRICS, *BLOCKED_METRICS)
_MS_PER_S = 1e3
STARTED = "started_ns"


def metrics_of_steps(columns: dict[str, Column]) -> dict[str, Array]:
    """Return the values of every metric, one per event of a decoded chunk of steps."""
    ns = np.array([columns[name] for name in _DURATIONS.values()])
    unknown = ns < 0
    times = (ns * _MS).astype("<f4")
    blocked = np.where(unknown[_BLOCKED_ROWS], 0, times[_BLOCKED_ROWS]).sum(axis=0, dtype="<f4")
    times[unknown] = np.nan
    values: dict[str, Array] = dict(zip(_DURATIONS, times, strict=True))
    unseen = (np.asarray(columns["flags"]) & STEP_WAITS_UNKNOWN) != 0
    blocked[unseen | np.isnan(values["step"])] = np.nan  # not 0
    values["blocked"] = blocked
    values["own_work"] = np.maximum(values["step"] - blocked, 0)
    for name in ("microbatches", "num_collectives", "flags"):
        values[name] = np.asarray(columns[name]).astype("<f4")
    values[STARTED] = np.maximum(np.asarray(columns["started_ns"]), 0)
    return values


def known_to_host(values: dict[str, Array]) -> dict[str, Array]:
    """Return of the metrics of a rank on a device what its host knows of these steps."""
    with np.errstate(invalid="ignore", divide="ignore"):
        waited = values["blocked"] / values["step"]
    if np.sum(waited > HOST_WAITS_RATIO) * 2 > len(waited):
        return values
    return {name: cells for name, cells in values.items() if name not in DEVICE_METRICS}


def metrics_of_device(values: Mapping[str, float]) -> dict[str, Array]:
    """Return the metrics of one step that a device measured; empty where its waits are not known.

    `values` are numbers by name, as in `rankscope.wire.metric_names`.
    """
    names = (*GPU_SECONDS.values(), *GPU_WAIT_SECONDS.values())
    is_known = any(name in values for name in GPU_WAIT_SECONDS.values())
    if not is_known or not all(math.isfinite(values.get(name, 0.0)) for name in names):
        return {}
    cells = {phase: values.get(name, 0.0) * _MS_PER_S for phase, name in GPU_SECONDS.items()}
    for phase, name in GPU_WAIT_SECONDS.items():
        blocked_in = f"{phase}_blocked"
        if blocked_in not in BLOCKED_METRICS:
            blocked_in = "other_blocked"
        cells[blocked_in] = cells.get(blocked_in, 0.0) + values.get(name, 0.0) * _MS_PER_S
    blocked = sum(cells[name] for name in BLOCKED_METRICS)
    cells["blocked"] = blocked
    cells["own_work"] = max(sum(cells[phase] for phase in PHASE_METRICS) - blocked, 0.0)
    return {name: np.array([cell], "<f4") for name, cell in cells.items()}
