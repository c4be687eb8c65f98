"""How far each rank's self time is from its reference, step by step, as a logarithm.

Reference `peers`: the median of the others of its role in the same step. Reference `own`: the
rank's own median over its first healthy steps, changed as the others changed meanwhile; for ranks
with too few peers, for example pipeline stages.

Each step is looked at in several views: all self time, and single phases. A phase is measured
against the reference of all self time, so that every view says by how much the *step* is longer;
an excess in one phase stands out there from the noise of the others.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rankscope_server.findings.policy import Policy
from rankscope_server.findings.statistics import Array, median, others_median, rolling_median
from rankscope_server.observe.step_table import Matrix, StepTable

Reference: TypeAlias = Literal["peers", "own"]


VIEWS: tuple[str, ...] = ("own", "data", "forward", "backward")
_LEAST = 0.05  # a step is never called shorter than a twentieth of its reference


@dataclass(frozen=True, slots=True)
class View:
    """`raw` is ln(1 + excess / reference), ranks x steps; the others are its rolling medians."""

    raw: Matrix
    short: Matrix
    long: Matrix

    def only(self, columns: NDArray[np.bool_]) -> View:
        """Return the view of some columns."""
        return View(self.raw[:, columns], self.short[:, columns], self.long[:, columns])


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far every rank is from its reference, in each view."""

    views: dict[str, View]
    peers: NDArray[np.bool_]  # per row: compared with peers
    roles: tuple[Hashable, ...]  # per row
    first_column: int  # columns before it are warm-up
    seen: NDArray[np.bool_]  # columns whose waits were seen; windows pass over the others

    @property
    def own(self) -> View:
        """Return the view of all self time."""
        return self.views["own"]

    def rows_by_role(self) -> list[list[int]]:
        """Return the rows of each role, in their order."""
        rows: dict[Hashable, list[int]] = {}
        for row, role in enumerate(self.roles):
            rows.setdefault(role, []).append(row)
        return list(rows.values())


def warmup_columns(duration: Array, policy: Policy) -> int:
    """Return how many leading steps are warm-up: until three agree, between 5 and 20."""
    times = median(duration[:, : policy.warmup_max_steps + 2], 0)
    for at in range(policy.warmup_steps, min(policy.warmup_max_steps, len(times) - 2)):
        three = times[at : at + 3]
        if np.ptp(three) <= policy.warmup_agree_ratio * np.min(three):
            return at
    return policy.warmup_max_steps


def usual_steps(table: StepTable, policy: Policy, *, are_most_special: bool = False) -> Array:
    """Return which columns are neither special nor warm-up, a mask.

    With `are_most_special`, special steps count where most are: a run may save in each of them.
    """
    usual: Array = ~table.special()
    if are_most_special and usual.size and usual.mean() < 0.5:
        usual[:] = True
    if not table.dropped_steps and table.num_steps:
        usual[: warmup_columns(table.head("duration"), policy)] = False
    return usual


def deviation_of(table: StepTable, roles: Mapping[int, Hashable], policy: Policy) -> Deviation:
    """Return the deviation of every rank, recomputing only columns that are new or changed."""
    row_roles = tuple(roles.get(rank, "") for rank in table.ranks)
    peers = _have_peers(row_roles, policy)
    warmup = warmup_columns(table.head("duration"), policy)
    steps = table.head_steps()  # some are left out where only samples are known
    if len(steps):
        warmup = min(warmup, int(np.searchsorted(steps, steps[0] + policy.warmup_max_steps)))
    base = {name: _base(table, name, warmup, policy) for name in VIEWS}
    _note_reference(table, base, row_roles, warmup)
    views = {
        name: View(*(table.derived(f"{name} {part}") for part in ("raw", "short", "long")))
        for name in VIEWS
    }
    first = table.clean_columns
    if first < table.num_steps:
        _renew(table, views, base, row_roles, peers, warmup, policy)
        table.mark_clean()
    return Deviation(views, peers, row_roles, max(0, warmup - table.dropped_steps), table.seen())


def _renew(
    table: StepTable,
    views: Mapping[str, View],
    base: Mapping[str, Array],
    roles: tuple[Hashable, ...],
    peers: NDArray[np.bool_],
    warmup: int,
    policy: Policy,
) -> None:
    """Compute the columns that are not clean."""
    first, seen = table.clean_columns, np.flatnonzero(table.seen())
    num_before = int(np.searchsorted(seen, first))
    later = seen[num_before:]
    usual = _normal_steps(table, "own", first, warmup)
    reference = _reference(usual, base["own"], base["own"], usual, roles, peers)
    for name, view in views.items():
        work = usual if name == "own" else _normal_steps(table, name, first, warmup)
        expected = (
            reference
            if name == "own"
            else _reference(work, base[name], base["own"], usual, roles, peers)
        )
        view.raw[:, first:] = np.log(np.fmax(1.0 + (work - expected) / reference, _LEAST))
        view.raw[:, first:][np.isnan(work - expected)] = np.nan
        for medians, window in (
            (view.short, policy.short_window),
            (view.long, policy.long_window),
        ):
            begin = max(num_before - window + 1, 0)  # what is before is in none of these windows
            medians[:, first:] = np.nan
            medians[:, later] = rolling_median(
                view.raw[:, seen[begin:]], window, num_before - begin
            )


def _have_peers(roles: tuple[Hashable, ...], policy: Policy) -> NDArray[np.bool_]:
    sizes: dict[Hashable, int] = {}
    for role in roles:
        sizes[role] = sizes.get(role, 0) + 1
    return np.array([sizes[role] >= policy.min_role_size for role in roles], bool)


def _base(table: StepTable, metric: str, warmup: int, policy: Policy) -> Array:
    """Return each rank's median of a metric over its first healthy steps, in ms.

    Where the first steps say nothing, as they were thinned or had moved on before the first look,
    those that first did count, for good.
    """
    work = table.head(metric)
    special = table.head_special()
    if special.mean() <= 0.5:
        work = np.where(special, np.nan, work)
    base = _first_median(work[:, warmup:], policy)
    kept = table.first_known.get(metric)
    if np.isnan(base).any() and (kept is None or np.isnan(kept).any() or len(kept) != len(base)):
        kept = _first_median(table.get(metric)[:, warmup:][:, table.seen()[warmup:]], policy)
        table.first_known[metric] = kept
    return base if kept is None else np.where(np.isnan(base), kept, base)


def _first_median(work: Array, policy: Policy) -> Array:
    """Return each row's median over the first columns, NaN where too few are known."""
    work = work[:, : policy.baseline_steps]
    if not work.shape[1]:
        return np.full(len(work), np.nan)
    enough = np.sum(~np.isnan(work), axis=1) >= policy.baseline_min_steps
    return np.where(enough, median(work), np.nan)


def _note_reference(
    table: StepTable, base: Mapping[str, Array], roles: tuple[Hashable, ...], warmup: int
) -> None:
    """Throw the derived columns away when what they are compared with has changed."""
    values = np.stack([base[name] for name in VIEWS])
    kept = table.reference
    if (
        kept is None
        or kept[1:] != (roles, warmup)
        or not np.array_equal(kept[0], values, equal_nan=True)
    ):
        table.mark_dirty()
    table.reference = (values, roles, warmup)


def _normal_steps(table: StepTable, metric: str, first: int, warmup: int) -> Array:
    """Return a metric from column `first` on, NaN in warm-up and special steps."""
    work: Array = table.get(metric, first).copy()
    special = table.special()
    if special.mean() <= 0.5:  # where most steps save or evaluate, they are the normal steps
        work[:, special[first:]] = np.nan
    if not table.dropped_steps and first < warmup:
        work[:, : warmup - first] = np.nan
    return work


def _reference(
    work: Array,
    base: Array,
    base_own: Array,
    own: Array,
    roles: tuple[Hashable, ...],
    peers: NDArray[np.bool_],
) -> Array:
    """Return what each cell of `work` is expected to be, in ms."""
    result = np.full_like(work, np.nan)
    for role in dict.fromkeys(roles):
        rows = np.array([other == role for other in roles])
        if peers[rows].all():
            needed = max(3, int(np.ceil(0.75 * rows.sum())))
            result[rows] = others_median(work[rows], needed)
    if not peers.all() and len(roles) > 1:
        change = own / base_own[:, None]
        # A change that the others share is global; where they became faster, no rank is slower.
        common = np.maximum(others_median(change, max(2, int(np.ceil(0.75 * len(roles))))), 1.0)
        result[~peers] = (base[:, None] * common)[~peers]
    return result
