"""The steps of one rank beside those of its peers: what a finding about it looks like."""

from __future__ import annotations

from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope_server.api.runs.queries import RANK_HEAD, rank_rows, role_of
from rankscope_server.api.steps.map import check_metric, own_part, planes_of, step_range
from rankscope_server.api.steps.queries import Array, bin_of, known_list, quiet, steps_of_many
from rankscope_server.api.steps.schema import BesidePeers
from rankscope_server.problems import not_found
from rankscope_server.store.tiles import read_blocks
from rankscope_server.text import duration_text, plural

RECENT_STEPS = 200
MAX_STEPS = 100_000
_FEW = 20  # peers of which the band holds all; of more the middle nine tenths
_WORDS = {"own_work": "of self time", "step": "a step", "blocked": "blocked on peers"}


def beside_peers(
    connection: sa.Connection,
    run: sa.Row[Any],
    rank: int,
    metric: str,
    lo: int | None,
    hi: int | None,
    width: int,
) -> BesidePeers:
    """Return a metric of one rank and of the others of its role, in bins of steps.

    Without a range of the last `RECENT_STEPS`; of very many ranks fewer. Raises Problem 404, 422.
    """
    check_metric(metric)
    stages = {
        row.rank: role_of(row) for row in rank_rows(connection, run.run_id, run.attempt, RANK_HEAD)
    }
    if rank not in stages:
        raise not_found(f"no rank {rank} in this run", "see /ranks for those that are", "rank")
    first, last = step_range(run, lo, hi)
    most = min(RECENT_STEPS if lo is None else MAX_STEPS, steps_of_many(run.world_size, stages))
    first = max(first, last - most + 1)
    peers = [one for one, stage in stages.items() if stage == stages[rank] and one != rank]
    steps = _rows(connection, run.run_id, metric, rank, sorted(peers), first, last)
    size = bin_of(last - first + 1, width)
    starts = np.arange(0, last - first + 1, size)
    value, worst, low, middle, high = (
        _folded(row, starts, function)
        for row, function in (
            (steps[0], np.nanmedian), (steps[0], np.nanmax), (steps[1], np.nanmin),
            (steps[2], np.nanmedian), (steps[3], np.nanmax),
        )
    )  # fmt: skip
    return BesidePeers(
        metric=metric,
        rank=rank,
        num_peers=len(peers),
        bin=size,
        step=(first + starts).tolist(),
        value_ms=known_list(value),
        worst_ms=known_list(worst),
        peers_lo_ms=known_list(low),
        peers_median_ms=known_list(middle),
        peers_hi_ms=known_list(high),
        text=_text(metric, rank, len(peers), steps),
    )


def _rows(
    connection: sa.Connection, run_id: str, metric: str, rank: int, peers: list[int],
    first: int, last: int,
) -> Array:  # fmt: skip
    """Return by step the rank, and the lowest, the median and the highest of its peers."""
    found = np.full((4, max(last - first + 1, 0)), np.nan)
    bounds = (0, 100) if len(peers) <= _FEW else (5, 95)
    for start, planes in read_blocks(connection, run_id, planes_of(metric), first, last):
        values = own_part(metric, planes)
        at = slice(start - first, start - first + values.shape[1])
        if rank < len(values):
            found[0, at] = values[rank]
        others = values[[one for one in peers if one < len(values)]]
        if len(others):
            found[1, at] = quiet(lambda v, axis: np.nanpercentile(v, bounds[0], axis), others, 0)
            found[2, at] = quiet(np.nanmedian, others, 0)
            found[3, at] = quiet(lambda v, axis: np.nanpercentile(v, bounds[1], axis), others, 0)
    return found


def _folded(row: Array, starts: Array, function: Any) -> Array:
    if not len(starts):
        return np.zeros(0)
    parts = np.split(row, starts[1:])
    return np.array([quiet(function, part) for part in parts])


def _text(metric: str, rank: int, num_peers: int, steps: Array) -> str:
    own, theirs = (float(quiet(np.nanmedian, row)) for row in (steps[0], steps[2]))
    if np.isnan(own):
        return f"Nothing is known of rank {rank} in these steps."
    words = _WORDS.get(metric, f"of {metric}")
    text = f"Rank {rank} takes {duration_text(own)} {words} in the median step"
    if np.isnan(theirs):
        return f"{text}; no other rank has its role."
    return f"{text}, its {plural(num_peers, 'peer')} {duration_text(theirs)}."
