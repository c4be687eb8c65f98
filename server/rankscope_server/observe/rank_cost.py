"""What a slow rank costs the job, and which phase of its step holds the excess."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rankscope.wire.formulas import throughput_loss
from rankscope_server.findings.policy import Policy
from rankscope_server.findings.statistics import Array, median, middle, others_median
from rankscope_server.observe.deviation import Deviation
from rankscope_server.observe.episodes import Episode
from rankscope_server.observe.step_table import OWN_PHASES, StepTable

_MEANS = 2.0  # standard errors within which two means are the same
_CLIP = 5.0  # beyond it a step is special


@dataclass(frozen=True, slots=True)
class Cost:
    """Throughput lost while it lasted. Times are medians in ms per step."""

    ratio: float
    sure: float  # the part of it that is left without the benefit of the means' error
    step_now_ms: float
    step_before_ms: float | None  # None: there was no healthy time before
    # Self time of the other ranks of its host against before, at most 1: while a rank is held up,
    # they have its processors.
    near_change: float = 1.0


@dataclass(frozen=True, slots=True)
class Excess:
    """Self time of a rank in an episode against its reference, ms per step (medians)."""

    own_ms: float
    reference_ms: float
    by_phase: dict[str, float]  # self time of the phase less its reference
    phase_ms: dict[str, float]
    phase_reference_ms: dict[str, float]
    cpu_ms: float | None
    cpu_reference_ms: float | None

    @property
    def total_ms(self) -> float:
        """Return the excess of the whole step."""
        return self.own_ms - self.reference_ms

    def ratio_or(self, otherwise: float) -> float:
        """Return self time / reference where the rank is slower by that, else `otherwise`."""
        is_slower = self.own_ms > self.reference_ms > 0
        return self.own_ms / self.reference_ms if is_slower else otherwise

    @property
    def scale(self) -> float:
        """Return what its work times this would be its reference, at most 1."""
        return min(1.0, max(0.0, self.reference_ms / self.own_ms)) if self.own_ms > 0 else 1.0


def calm_columns(table: StepTable, episodes: Sequence[Episode]) -> NDArray[np.bool_]:
    """Return which columns are normal steps, of known waits, outside all episodes of all ranks."""
    calm = ~table.special() & table.seen()
    for episode in episodes:
        calm[episode.columns] = False
    return calm


def healthy_columns(calm: NDArray[np.bool_], first: int, begin: int, policy: Policy) -> Array:
    """Return the last calm columns before `first`, not earlier than `begin`."""
    normal = calm.copy()
    normal[:begin] = normal[first:] = False
    return np.flatnonzero(normal)[-policy.healthy_long_steps :]


def cost_of(
    table: StepTable,
    deviation: Deviation,
    episodes: Sequence[Episode],
    columns: slice,
    calm: NDArray[np.bool_],
    near: Sequence[int],
    policy: Policy,
) -> Cost:
    """Return what the ranks of `episodes` cost over `columns`; `near` are others of their hosts.

    Two estimates, of which the smaller holds. What their excess explains: by how much they are
    later, against their peers, than any other rank in the same step; in plain data
    parallel all wait for the latest, and in a pipeline, too; ranks
    of the same host that became faster meanwhile would be as slow again without it. And what the
    job lost: its step time against that before the onset, changed as the work of the other
    ranks changed. A rank that is held up leaves them its share of the processors, no more:
    where all others are of its host and became faster than that, something else left the host
    or the job's steps became shorter, and the time before the onset shows nothing. Where
    hiccups of many ranks make about every second step long, a median shows one or the other
    kind of step, so the mean is asked, too, and the larger of both counts, with twice the error
    that such means have; whether the rank is reported is decided without it.
    """
    rows = sorted({episode.row for episode in episodes})
    usual = ~table.special()[columns] & table.seen()[columns]
    inside = np.flatnonzero(usual)[-policy.cost_steps :] + columns.start
    healthy = healthy_columns(calm, columns.start, deviation.first_column, policy)
    is_known = len(healthy) >= policy.healthy_min_steps
    change = min(1.0, change_of_work(table, near, healthy, inside)) if is_known else 1.0
    if all(deviation.peers[row] for row in rows):
        least = len(near) / (len(near) + len(rows))
        is_known &= change >= least or len(near) + len(rows) < len(table.row_of)
        change = max(change, least)
    slower = np.ones(len(table.row_of))
    slower[list(near)] /= change
    step, gap = step_times(table, inside), _gap(table, deviation, rows, inside, slower)
    known = ~np.isnan(step) & ~np.isnan(gap)
    if not known.any():
        return Cost(0.0, 0.0, float("nan"), None)
    now, total, extra = middle(step), float(np.sum(step[known])), float(np.sum(gap[known]))
    if not is_known:
        ratio = throughput_loss(total, total - extra)
        return Cost(ratio, ratio, now, None, change)
    extra -= _usual(_gap(table, deviation, rows, healthy, np.ones_like(slower))) * int(known.sum())
    lately = healthy[-policy.healthy_steps :]
    lost = []
    for typical in (middle, clipped_mean):
        before = min(
            typical(step_times(table, then)) * _common_change(table, rows, near, then, inside)
            for then in (healthy, lately)
        )
        lost.append(throughput_loss(typical(step), before))
    explained, felt = throughput_loss(total, total - extra), max(lost)
    return Cost(
        ratio=min(explained, felt + _MEANS * _error(step, step_times(table, healthy))),
        sure=min(explained, felt),
        step_now_ms=now,
        step_before_ms=middle(step_times(table, lately)),
        near_change=change,
    )


def _usual(gap_ms: Array) -> float:
    """Return for how long the job waited for these ranks before: what is certain of the mean."""
    known = gap_ms[~np.isnan(gap_ms)]
    if not len(known):
        return 0.0
    error = float(known.std() / np.sqrt(len(known)))
    return max(float(np.median(known)), float(known.mean()) - _MEANS * error)


def _error(now_ms: Array, before_ms: Array) -> float:
    """Return the standard error of the ratio of two mean steps: with hiccups it is some percent."""
    parts = [one[~np.isnan(one)] for one in (now_ms, before_ms)]
    clipped = [np.minimum(part, _CLIP * np.median(part)) for part in parts]
    return float(np.sqrt(sum(one.var() / len(one) / one.mean() ** 2 for one in clipped)))


def clipped(step_ms: Array) -> Array:
    """Return the steps, none counting more than `_CLIP` medians: a stall is no slowness."""
    short: Array = np.minimum(step_ms, _CLIP * middle(step_ms))
    return short


def clipped_mean(step_ms: Array) -> float:
    """Return the mean of the clipped steps."""
    known = step_ms[~np.isnan(step_ms)]
    return float(clipped(known).mean()) if len(known) else float("nan")


def step_times(table: StepTable, columns: Array) -> Array:
    """Return the time of the job's steps: ranks end a step together, so some of them will do."""
    return median(table.get("duration")[table.some_rows(), columns], 0)


def _common_change(
    table: StepTable, rows: Sequence[int], near: Sequence[int], then: Array, now: Array
) -> float:
    """Return by how much the self time of the other ranks changed, as a ratio.

    Ranks of the same host count if there are no others, and then only if they became slower.
    """
    others = np.setdiff1d(np.arange(len(table.row_of)), [*rows, *near])
    if len(others):
        return change_of_work(table, others, then, now)
    return max(1.0, change_of_work(table, near, then, now))


def change_of_work(table: StepTable, rows: Iterable[int], then: Array, now: Array) -> float:
    """Return how many times as long rows work in columns `now` as `then`; 1 if not known."""
    chosen = np.array(list(rows), int)
    if not len(chosen) or not len(then):
        return 1.0
    own = table.get("own")
    change = middle(median(own[np.ix_(chosen, now)]) / median(own[np.ix_(chosen, then)]))
    return change if np.isfinite(change) and change > 0 else 1.0


def _gap(
    table: StepTable, deviation: Deviation, rows: Sequence[int], columns: Array, slower: Array
) -> Array:
    """Return for each of `columns` the ms by which `rows` are later than any other, at least 0.

    Without them the others would work `slower` times as long, one factor a row.
    """
    own, roles = table.get("own")[:, columns] * slower[:, None], deviation.roles
    excess = np.full(own.shape, np.nan)
    for role in set(roles):
        mine = [row for row, other in enumerate(roles) if other == role]
        others = [row for row in mine if row not in rows]
        if others:
            excess[mine] = own[mine] - median(own[others], 0)
        else:  # alone in its role: against what it was
            excess[mine] = own[mine] * -np.expm1(-deviation.own.raw[mine][:, columns])
    culprits = np.isin(np.arange(len(own)), rows)
    late = np.fmax.reduce(excess[culprits], axis=0)
    others_late = np.fmax.reduce(excess[~culprits], axis=0, initial=0.0)
    gap: Array = np.fmax(late - others_late, 0.0)
    return gap


def excess_of(
    table: StepTable,
    deviation: Deviation,
    episode: Episode,
    calm: NDArray[np.bool_],
    policy: Policy,
) -> Excess:
    """Return in which phases the excess of an episode is."""
    row = episode.row
    columns = np.flatnonzero(table.seen()[episode.columns])[-policy.cost_steps :] + episode.first
    if deviation.peers[row]:
        peers = [r for r, role in enumerate(deviation.roles) if role == deviation.roles[row]]
        at = peers.index(row)

        def reference(metric: str) -> float:
            values = table.get(metric)[peers][:, columns]
            return middle(others_median(values, 2)[at])
    else:
        healthy = healthy_columns(calm, episode.first, deviation.first_column, policy)

        def reference(metric: str) -> float:
            head = table.head(metric)[row, : policy.warmup_max_steps + policy.baseline_steps]
            lately = healthy[-policy.healthy_steps :]
            return middle(table.get(metric)[row, lately] if len(lately) else head)

    return excess_between(lambda name: middle(table.get(name)[row, columns]), reference)


def excess_between(of_now: Callable[[str], float], of_then: Callable[[str], float]) -> Excess:
    """Return the excess of what `of_now` says of each metric over its reference, both in ms."""
    now = {name: of_now(name) for name in ("own", "cpu", *OWN_PHASES)}
    then = {name: of_then(name) for name in now}
    return Excess(
        own_ms=now["own"],
        reference_ms=then["own"],
        by_phase={name: now[name] - then[name] for name in OWN_PHASES},
        phase_ms={name: now[name] for name in OWN_PHASES},
        phase_reference_ms={name: then[name] for name in OWN_PHASES},
        cpu_ms=_known(now["cpu"]),
        cpu_reference_ms=_known(then["cpu"]),
    )


def phase_excess(
    table: StepTable, deviation: Deviation, row: int, phase: str, columns: slice
) -> Array:
    """Return self time of a phase less its peers' median, per column; without peers as it is."""
    if not deviation.peers[row]:
        alone: Array = table.get(phase)[row, columns]
        return alone
    peers = [r for r, role in enumerate(deviation.roles) if role == deviation.roles[row]]
    values = table.get(phase)[peers, columns]
    excess: Array = (values - others_median(values, 2))[peers.index(row)]
    return excess


def _known(value: float) -> float | None:
    return value if np.isfinite(value) else None
