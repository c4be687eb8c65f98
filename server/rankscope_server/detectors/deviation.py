"""How far each rank's own work lies from its reference, step by step, as a logarithm.

Reference `peers`: the median of the others of its role in the same step. Reference `own`: the
rank's own median over its first healthy steps, less what the other ranks changed meanwhile; for
ranks with too few peers, for example pipeline stages.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rankscope_server.detectors.policy import Policy
from rankscope_server.detectors.robust import median, others_median, rolling_median
from rankscope_server.detectors.step_table import Matrix, StepTable

Reference: TypeAlias = Literal["peers", "own"]
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Deviation:
    """`raw` is ln(own work / reference), ranks x steps; `short` and `long` its rolling medians."""

    raw: Matrix
    short: Matrix
    long: Matrix
    base: Array  # own reference per row, in ln ms; NaN where not known
    peers: NDArray[np.bool_]  # per row: compared with peers
    roles: tuple[Hashable, ...]  # per row
    first_column: int  # columns before it are warm-up


def warmup_columns(duration: Array, policy: Policy) -> int:
    """Return how many leading steps are warm-up: until three agree, between 5 and 20."""
    times = median(duration[:, : policy.warmup_max_steps + 2], 0)
    for at in range(policy.warmup_steps, min(policy.warmup_max_steps, len(times) - 2)):
        three = times[at : at + 3]
        if np.ptp(three) <= policy.warmup_agree_ratio * np.min(three):
            return at
    return policy.warmup_max_steps


def deviation(table: StepTable, roles: Mapping[int, Hashable], policy: Policy) -> Deviation:
    """Return the deviation of every rank, recomputing only columns that are new or changed."""
    row_roles = tuple(roles.get(rank, "") for rank in table.ranks)
    peers = _have_peers(row_roles, policy)
    warmup = warmup_columns(table.head("duration"), policy)
    base = _base(table, warmup, policy)
    _note_reference(table, base, row_roles, warmup)
    raw, short, long = (table.derived(name) for name in ("raw", "short", "long"))
    first = table.clean_columns
    if first < table.num_steps:
        work = _log_work(table, first, warmup)
        raw[:, first:] = _compare(work, base, row_roles, peers)
        short[:, first:] = rolling_median(raw, policy.short_window, first)
        long[:, first:] = rolling_median(raw, policy.long_window, first)
        table.mark_clean()
    first_column = max(0, warmup - table.dropped_steps)
    return Deviation(raw, short, long, base, peers, row_roles, first_column)


def _have_peers(roles: tuple[Hashable, ...], policy: Policy) -> NDArray[np.bool_]:
    sizes: dict[Hashable, int] = {}
    for role in roles:
        sizes[role] = sizes.get(role, 0) + 1
    return np.array([sizes[role] >= policy.min_role_size for role in roles], bool)


def _base(table: StepTable, warmup: int, policy: Policy) -> Array:
    """Return ln of each rank's median own work over its first healthy steps."""
    work = _ln(table.head("own"))
    special = table.head_special()
    if special.mean() <= 0.5:
        work = np.where(special, np.nan, work)
    work = work[:, warmup : warmup + policy.baseline_steps]
    if not work.shape[1]:
        return np.full(len(work), np.nan)
    enough = np.sum(~np.isnan(work), axis=1) >= policy.baseline_min_steps
    return np.where(enough, median(work), np.nan)


def _note_reference(
    table: StepTable, base: Array, roles: tuple[Hashable, ...], warmup: int
) -> None:
    """Throw the derived columns away when what they are compared with has changed."""
    kept = table.reference
    if (
        kept is None
        or kept[1:] != (roles, warmup)
        or not np.array_equal(kept[0], base, equal_nan=True)
    ):
        table.mark_dirty()
    table.reference = (base, roles, warmup)


def _log_work(table: StepTable, first: int, warmup: int) -> Array:
    work = _ln(table.get("own", first))
    special = table.special()
    if special.mean() <= 0.5:  # where most steps save or evaluate, they are the normal steps
        work[:, special[first:]] = np.nan
    if not table.dropped_steps and first < warmup:
        work[:, : warmup - first] = np.nan
    return work


def _compare(
    work: Array, base: Array, roles: tuple[Hashable, ...], peers: NDArray[np.bool_]
) -> Array:
    result = np.full_like(work, np.nan)
    for role in dict.fromkeys(roles):
        rows = np.array([other == role for other in roles])
        if peers[rows].all():
            needed = max(3, int(np.ceil(0.75 * rows.sum())))
            result[rows] = work[rows] - others_median(work[rows], needed)
    if not peers.all() and len(roles) > 1:
        change = work - base[:, None]
        # A change that the others share is global; where they became faster, nobody is slower.
        common = np.maximum(others_median(change, max(2, int(np.ceil(0.75 * len(roles))))), 0.0)
        result[~peers] = (change - common)[~peers]
    return result


def _ln(values: Array) -> Array:
    return np.log(np.where(values > 0, values, np.nan))
