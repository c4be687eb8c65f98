"""Each step of the job in a few numbers: how long it took, what was waited, which rank was slow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope_server.api.steps.map import fit, load_peers, step_range
from rankscope_server.api.steps.queries import (
    Array,
    known,
    known_list,
    load_range,
    quiet,
    steps_of_many,
    waiting_planes,
)
from rankscope_server.api.steps.schema import StepRow, Steps
from rankscope_server.ingest.step_metrics import STARTED
from rankscope_server.verdict.budget import waited
from rankscope_server.verdict.reference import ratios

MAX_STEPS = 4_096  # of one answer
_PLANES = ("step", "blocked", "own_work", "num_collectives", STARTED)


def steps(connection: sa.Connection, run: sa.Row[Any], lo: int | None, hi: int | None) -> Steps:
    """Return the steps `lo`..`hi` of a run that any rank sent. Raises Problem 422.

    At most `MAX_STEPS`, and of very many ranks fewer.
    """
    first, last = step_range(run, lo, hi)
    peers = load_peers(connection, run, "own_work")
    most = min(MAX_STEPS, steps_of_many(peers.height, ()))
    until = min(last, first + most - 1)
    planes = load_range(connection, run.run_id, _PLANES, first, until)
    planes = {name: fit(plane, peers.height) for name, plane in planes.items()}
    waiting = _waiting(waiting_planes(planes), peers.roles)
    ranks, slowest = _slowest(ratios(planes["own_work"], peers.roles, peers.early).ratio)
    took = known_list(quiet(np.nanmax, planes["step"], axis=0))
    sent = (~np.isnan(planes["step"])).sum(axis=0).tolist()
    began = quiet(np.nanmin, np.where(planes[STARTED] > 0, planes[STARTED], np.nan), axis=0)
    rows = [
        StepRow(
            step=first + at,
            time_ms=known(began[at] / 1e6),
            num_ranks=count,
            step_ms=took[at],
            waiting_ratio=known(waiting[at]),
            slowest_rank=ranks[at],
            slowest_ratio=known(slowest[at]),
        )
        for at, count in enumerate(sent)
        if count
    ]
    return Steps(
        num_expected=peers.height,
        last_step=run.step,
        steps=rows,
        next_step=until + 1 if until < last else None,
    )


def _waiting(planes: dict[str, Array], roles: Sequence[int]) -> Array:
    """Return by step which share of the ranks' time was waiting for others."""
    waits = waited(planes["blocked"], roles)
    during = np.where(np.isnan(waits), np.nan, planes["step"])
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(quiet(np.nansum, waits, axis=0) / quiet(np.nansum, during, axis=0))


def _slowest(ratio: Array) -> tuple[list[int | None], Array]:
    """Return by step the rank of the largest ratio, and this; None and NaN where none is known."""
    largest = quiet(np.nanmax, ratio, axis=0)
    at = np.argmax(np.nan_to_num(ratio, nan=-np.inf), axis=0) if len(ratio) else []
    return [
        None if np.isnan(value) else int(rank) for rank, value in zip(at, largest, strict=True)
    ], largest
