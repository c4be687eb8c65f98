"""Episodes: stretches of steps in which a rank is above its reference.

Entry and exit come from rolling medians: where an episode begins and ends is then read
from the raw steps, because a rolling median is late by half its window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rankscope.wire.formulas import MEDIAN_SCATTER, outlier_cut
from rankscope_server.findings.policy import Policy
from rankscope_server.findings.statistics import Array, median, middle, others_median, scatter
from rankscope_server.observe.deviation import VIEWS, Deviation, View

_LEAST_NOISE = 1e-3


@dataclass(frozen=True, slots=True)
class Episode:
    """Columns `first` to `last`, both inside; `size` is the median of ln(work / reference)."""

    view: str
    row: int
    first: int
    last: int
    ended: bool
    size: float
    consistent: float  # share of its steps that are bad by half the size
    strength: float  # size / what noise alone would reach over such a stretch

    @property
    def columns(self) -> slice:
        """Return the columns of the episode."""
        return slice(self.first, self.last + 1)

    @property
    def num_columns(self) -> int:
        """Return how many columns it has."""
        return self.last - self.first + 1

    @property
    def excess(self) -> float:
        """Return what the episode adds up to, in steps of the reference, as a logarithm."""
        return self.size * self.num_columns


@dataclass(frozen=True, slots=True)
class Levels:
    """Entry levels per row, as logarithms, and what they rest on."""

    short: Array
    long: Array
    sigma: Array  # scatter of one step
    slow_sigma: Array  # scatter of a long median
    cut: float


def entry_levels(
    view: View, deviation: Deviation, first_column: int, num_steps: int, policy: Policy
) -> Levels:
    """Return where an episode begins: max(floor, z x scatter of the rolling median).

    The scatter of a median of W independent steps is 1.25 sigma / sqrt(W). Steps on a shared host
    are not independent, so the scatter of the rolling medians is also measured directly, and the
    larger of both counts; where there are peers that of a usual one, as a row that is slow now and
    then would be measured by itself. z is that of the number of windows that are looked at.
    """
    peers = deviation.peers
    begin = max(first_column, view.raw.shape[1] - policy.scatter_steps)
    sigma = _pooled(scatter(view.raw[:, begin:]))
    levels, slow = {}, sigma
    cut = 0.0
    for window, medians in (
        (policy.short_window, view.short),
        (policy.long_window, view.long),
    ):
        noise = sigma * MEDIAN_SCATTER / np.sqrt(window)
        own = _pooled(_slow_scatter(medians[:, begin:], window))
        slow = np.fmax(noise, _of_peers(own, deviation))
        reference = sigma * MEDIAN_SCATTER / np.sqrt(policy.baseline_steps)
        reference[peers] = 0.0
        cut = outlier_cut(len(VIEWS) * len(sigma) * num_steps / window)
        levels[window] = np.fmax(policy.ln_entry_floor, cut * np.hypot(slow, reference))
    return Levels(levels[policy.short_window], levels[policy.long_window], sigma, slow, cut)


def _slow_scatter(medians: Array, window: int) -> Array:
    """Return the scatter of rolling medians; of a short record that of the other rows.

    One lasting shift moves all differences of a record of less than two windows: the scatter that
    it would be measured by would be its own.
    """
    sigma = scatter(medians, window)
    is_short = np.sum(~np.isnan(medians), axis=1) <= 2 * window
    others: Array = others_median(sigma[:, None], 1)[:, 0]
    return np.where(is_short, others, sigma)


def _of_peers(sigma: Array, deviation: Deviation) -> Array:
    """Return the scatter of each row, where it has peers the median of its role."""
    usual = sigma.copy()
    for rows in deviation.rows_by_role():
        if deviation.peers[rows].all():
            usual[rows] = median(sigma[rows])
    return usual


def _pooled(sigma: Array) -> Array:
    """Return each row's scatter, not below the median of all: a short record may look calm."""
    return np.fmax(sigma, median(sigma)) if len(sigma) else sigma


def find_episodes(deviation: Deviation, num_steps: int, policy: Policy) -> list[Episode]:
    """Return the proved episodes of all rows; where views overlap, the one that shows it best."""
    found: list[Episode] = []
    seen = deviation.seen
    first_column = int(seen[: deviation.first_column].sum())
    for name, every in deviation.views.items():
        view = every if seen.all() else every.only(seen)
        if not _may_enter(view, first_column, policy):
            continue
        levels = entry_levels(view, deviation, first_column, num_steps, policy)
        found += _episodes_in(name, view, levels, first_column, policy)
    # A few steps in a phase that is calm otherwise are strong, but must not hide the long episode.
    main = [
        episode
        for episode in found
        if not any(_overlap(episode, o) and o.excess >= 2 * episode.excess for o in found)
    ]
    kept: list[Episode] = []
    for episode in sorted(main, key=lambda episode: -episode.strength):
        if not any(_overlap(episode, other) for other in kept):
            kept.append(episode)
    at = np.flatnonzero(seen)
    kept = [replace(one, first=int(at[one.first]), last=int(at[one.last])) for one in kept]
    return sorted(kept, key=lambda episode: (episode.row, episode.first))


def _overlap(episode: Episode, other: Episode) -> bool:
    return episode.row == other.row and episode.first <= other.last and other.first <= episode.last


def _may_enter(view: View, first_column: int, policy: Policy) -> bool:
    """Return whether any row is above the least entry level that there is: mostly none is."""
    return any(
        float(np.fmax.reduce(medians[:, first_column:], axis=None, initial=0.0))
        > policy.ln_entry_floor
        for medians in (view.short, view.long)
    )


def _episodes_in(
    name: str, view: View, levels: Levels, first_column: int, policy: Policy
) -> list[Episode]:
    with np.errstate(invalid="ignore"):
        entering = (view.short > levels.short[:, None]) | (view.long > levels.long[:, None])
    entering[:, :first_column] = False
    episodes = []
    for row in np.flatnonzero(entering.any(axis=1)).tolist():
        episodes += _episodes_of(name, row, entering[row], view, levels, first_column, policy)
    return episodes


def _episodes_of(
    name: str,
    row: int,
    entering: Array,
    view: View,
    levels: Levels,
    first_column: int,
    policy: Policy,
) -> list[Episode]:
    raw, short, long = view.raw[row], view.short[row], view.long[row]
    share = policy.leave_share
    staying = (short > share * levels.short[row]) | (long > share * levels.long[row])
    staying |= np.isnan(short) & np.isnan(long)  # missing steps end nothing
    episodes: list[Episode] = []
    at, columns = 0, len(entering)
    while at < columns and entering[at:].any():
        entry = at + int(np.argmax(entering[at:]))
        gone = np.flatnonzero(~staying[entry:])
        leave = entry + int(gone[0]) if len(gone) else columns
        begin = episodes[-1].last + 1 if episodes else first_column
        onset = _stretch(raw, begin, entry, leave, policy)
        at = leave + 1
        if onset is None:
            continue
        first, last = onset
        if episodes and _goes_on(episodes[-1], raw, first, last, policy):
            first = episodes.pop().first
        worse = _much_worse(raw, first, last, policy)
        parts = [(first, last)] if worse is None else [(first, worse - 1), (worse, last)]
        for begin, end in parts:
            ended = leave < columns or end != last
            episode = _episode(name, row, raw, begin, end, ended, levels, policy)
            if episode is not None:
                episodes.append(episode)
    return episodes


def _much_worse(raw: Array, first: int, last: int, policy: Policy) -> int | None:
    """Return from which column on a stretch is another, many times worse one; None if it is one.

    Other work on the host, just before, must neither hide it in a median nor make it uneven. The
    cut is the one that explains most squares, of those with so much between both means.
    """
    known = first + np.flatnonzero(~np.isnan(raw[first : last + 1]))
    before = np.arange(1, len(known) - policy.huge_steps + 1)
    if not len(before):
        return None
    sums, after = np.cumsum(raw[known]), len(known) - before
    gap = (sums[-1] - sums[before - 1]) / after - sums[before - 1] / before
    gain = np.where(gap >= np.log(policy.huge_ratio), gap**2 * before * after, 0.0)
    return int(known[1 + np.argmax(gain)]) if gain.any() else None


def _goes_on(before: Episode, raw: Array, first: int, last: int, policy: Policy) -> bool:
    """Return whether a stretch belongs to the episode before it, with a breath between."""
    size = middle(raw[first : last + 1])
    alike = min(size, before.size) >= policy.same_size_share * max(size, before.size)
    return alike and first - before.last <= policy.long_window


def _stretch(
    raw: Array, begin: int, entry: int, leave: int, policy: Policy
) -> tuple[int, int] | None:
    """Return the first and last bad column around an entry at `entry` and an exit at `leave`."""
    window = policy.long_window
    begin = max(begin, entry - 4 * window)
    size = middle(raw[max(begin, entry - policy.short_window + 1) : leave])
    before = middle(raw[begin : max(begin, entry - window)])
    calm = min(before, size / 2) if np.isfinite(before) else 0.0
    if not size > calm:
        return None
    first = begin + turning_point(raw[begin : entry + 1], calm, size)
    if leave >= len(raw):
        return first, leave - 1
    return first, leave - 1 - turning_point(raw[first:leave][::-1], calm, size)


def _episode(
    name: str,
    row: int,
    raw: Array,
    first: int,
    last: int,
    ended: bool,
    levels: Levels,
    policy: Policy,
) -> Episode | None:
    inside = raw[first : last + 1]
    known = inside[~np.isnan(inside)]
    if len(known) < policy.min_episode_steps:
        return None
    size = float(np.median(known))
    noise = levels.sigma[row] * MEDIAN_SCATTER / np.sqrt(len(known))
    slow = levels.slow_sigma[row] * np.sqrt(min(1.0, policy.long_window / len(known)))
    strength = size / max(levels.cut * float(np.fmax(noise, slow)), _LEAST_NOISE)
    if strength <= 1 or size <= policy.ln_entry_floor:
        return None
    consistent = float(np.mean(known > size / 2))
    return Episode(name, row, first, last, ended, size, consistent, strength)


def turning_point(raw: Array, calm: float, size: float) -> int:
    """Return where `raw` turns from `calm` to `size`, the end being in the episode.

    It is the point after which most is gained by calling the steps bad: the largest sum, from
    there to the end, of what each step is above the middle of both levels. A step counts by no
    more than half the gap, so a single hiccup does not pull the point towards it.
    """
    middle = (calm + size) / 2
    gain = np.nan_to_num(np.clip(raw, calm, size) - middle, nan=0.0)
    sums = np.cumsum(gain[::-1])[::-1]
    return int(np.argmax(sums))
