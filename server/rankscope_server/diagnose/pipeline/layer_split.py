"""The best split of a model's layers into pipeline stages, from their measured times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def best_split(
    layer_ms: Sequence[float],
    num_stages: int,
    *,
    layer_bytes: Sequence[float] = (),
    stage_limit_bytes: float = float("inf"),
) -> tuple[int, ...] | None:
    """Return how many layers each stage takes so that the slowest stage is as fast as can be.

    Dynamic programme over prefixes: the best slowest stage of the first i layers in k stages is
    the least over j of max(best of the first j in k - 1, layers j to i). Layers keep their order,
    so the first (embedding) stays on the first stage and the last (loss) on the last. Every stage
    takes at least one. None where no split keeps every stage below `stage_limit_bytes`.
    """
    count = len(layer_ms)
    if not 1 <= num_stages <= count:
        return None
    times = np.concatenate([[0.0], np.cumsum(layer_ms)])
    sizes = np.concatenate([[0.0], np.cumsum(layer_bytes or np.zeros(count))])
    best = np.full((num_stages + 1, count + 1), np.inf)
    cut = np.zeros((num_stages + 1, count + 1), np.int64)
    best[0, 0] = 0.0
    for stage in range(1, num_stages + 1):
        for stop in range(stage, count + 1):
            begins = np.arange(stage - 1, stop)
            fits = sizes[stop] - sizes[begins] <= stage_limit_bytes
            slowest = np.maximum(best[stage - 1, begins], times[stop] - times[begins])
            slowest = np.where(fits, slowest, np.inf)
            cut[stage, stop] = begins[np.argmin(slowest)]
            best[stage, stop] = slowest.min()
    if not np.isfinite(best[num_stages, count]):
        return None
    bounds = [count]
    for stage in range(num_stages, 0, -1):
        bounds.append(int(cut[stage, bounds[-1]]))
    return tuple(int(size) for size in np.diff(bounds[::-1]))
