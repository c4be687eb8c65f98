"""Ranks whose steps stall now and then, while most are as fast as ever.

Medians do not see them, and in a synchronous job each such step is late for all ranks. A stall is
counted against the counts of the other ranks: what a shared host does to all is no rank's fault.
Pauses of Python's collector are measured by the agent and need no guess.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rankscope.wire.formulas import outlier_cut
from rankscope_server.diagnose.shared.comparison import lack_of, roles_of
from rankscope_server.diagnose.shared.processor_limit import limit_of, throttled
from rankscope_server.diagnose.stalls.words import Stalling, finding_of, name_of
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import DetectorResult, Severity, ran, skipped
from rankscope_server.findings.policy import Policy
from rankscope_server.findings.severity import severity_of_cost
from rankscope_server.findings.statistics import Array, median, scatter
from rankscope_server.observe.deviation import Deviation, deviation_of
from rankscope_server.observe.step_table import OWN_PHASES, StepTable

_MAX_CELLS = 1 << 22  # of ranks and steps, that a longer look back reads
_PHASES = tuple(phase for phase in OWN_PHASES if phase != "data")  # waiting for data: data-loading


class Stalls:
    """Finds ranks that stall again and again, and collector pauses that hold up the others."""

    name: ClassVar[str] = "stalls"
    finds: ClassVar[str] = (
        "Ranks that stall in some steps again and again, and collector pauses that fall on other "
        "steps on each rank"
    )
    needs: ClassVar[str] = (
        "steps of two or more ranks; collector pauses as the agent measures them; samples of ranks "
        "for the kind"
    )
    silent: ClassVar[str] = (
        "fewer than six stalls in the newest 512 steps, of long ones in 2,048; other ranks stall a "
        "third as often; the rank is slow in every step: see `straggler`"
    )

    def look(self, window: Window) -> DetectorResult:
        """Return ranks whose stalls cost the job enough."""
        lack = lack_of(window)
        if lack is not None:
            return skipped(self, *lack)
        table, policy = window.steps, window.policy
        deviation = deviation_of(table, roles_of(window), policy)
        first = max(deviation.first_column, table.num_steps - policy.stall_steps)
        columns = first + np.flatnonzero(np.any(~np.isnan(deviation.own.raw[:, first:]), axis=0))
        if len(columns) < policy.min_steps:
            return skipped(self, f"needs {policy.min_steps} steps beyond the warm-up", "wait")
        cases = list(_cases(Work.of(window, deviation, columns), policy))
        longer = _longer(table, deviation, policy)
        if len(longer):
            named = {table.row_of[case.rank] for case in cases if case.rank is not None}
            cases += _of_some_steps(Work.of(window, deviation, longer), named, policy, rare=True)
        cases = [_since_before(window, case) for case in cases]
        return ran(self, [finding_of(window, case) for case in cases])


def _longer(table: StepTable, deviation: Deviation, policy: Policy) -> NDArray[np.intp]:
    """Return columns, further back, in which a row may stall seldom and for long; mostly none."""
    most = max(
        policy.stall_steps, min(policy.stall_rare_steps, _MAX_CELLS // max(1, len(table.ranks)))
    )
    first = max(deviation.first_column, table.num_steps - most)
    raw = deviation.own.raw[:, first:]
    with np.errstate(invalid="ignore"):
        far = np.count_nonzero(raw > policy.ln_stall_clear, axis=1)
    if table.num_steps - first <= policy.stall_steps or not np.any(far >= policy.stall_least):
        return np.zeros(0, np.intp)
    return first + np.flatnonzero(np.any(~np.isnan(raw), axis=0))


def _since_before(window: Window, case: Stalling) -> Stalling:
    """Return the case with the onset that was seen when it was among the newest steps."""
    old = window.before.get(f"{window.attempt}/{Stalls.name}/{name_of(case)}")
    if case.is_over or old is None or old.state != "open" or old.onset_step is None:
        return case
    return replace(case, onset_step=min(case.onset_step, old.onset_step))


@dataclass(frozen=True, slots=True)
class Work:
    """Self time without waiting for data, pauses in it, and how far it is from its reference.

    Of steps in which some rank's is known: between those that were recorded whole nothing is calm.
    """

    window: Window
    columns: NDArray[np.intp]  # of the table
    own_ms: Array  # ranks x columns
    pause_ms: Array
    far: Array  # ln(1 + excess / reference)
    step_ms: Array  # columns: how long the job's step took, with what all wait for
    # rows without peers by their roles: each is far from what it was itself, no two from the same
    alone: Mapping[Hashable, Sequence[int]]

    @classmethod
    def of(cls, window: Window, deviation: Deviation, columns: NDArray[np.intp]) -> Work:
        """Read it from the table."""
        table = window.steps
        own = table.get("own")[:, columns] - np.nan_to_num(table.get("data")[:, columns])
        data = np.nan_to_num(np.exp(deviation.views["data"].raw[:, columns]) - 1)
        # what is not known stays so: np.fmax would make it calm
        far = np.log(np.maximum(np.exp(deviation.own.raw[:, columns]) - data, 0.05))
        own = np.where(np.isnan(far), np.nan, own)  # special steps are left out
        pauses = np.minimum(np.nan_to_num(table.get("gc")[:, columns]), np.nan_to_num(own))
        durations = np.nan_to_num(table.get("duration")[:, columns])
        alone: dict[Hashable, list[int]] = {}
        for row in np.flatnonzero(~deviation.peers).tolist():
            alone.setdefault(deviation.roles[row], []).append(row)
        return cls(window, columns, own, pauses, far, durations.max(axis=0), alone)

    @property
    def steps(self) -> Array:
        """Return the number of the step of each column."""
        return self.window.steps.steps[self.columns]

    def usual_ms(self) -> Array:
        """Return each rank's median."""
        return median(self.own_ms)

    def lost(self, without: Array) -> float:
        """Return the share of the job's time that is gone with `without` as the ranks' work."""
        known = ~np.all(np.isnan(self.own_ms), axis=0)
        gained = float((_slowest(self.own_ms) - _slowest(without)).sum())
        time = float(np.fmax(_slowest(self.own_ms), self.step_ms[known]).sum())
        return gained / time if time > 0 else 0.0


def _slowest(work: Array) -> Array:
    known = ~np.all(np.isnan(work), axis=0)
    slowest: Array = np.nanmax(work[:, known], axis=0) if known.any() else np.zeros(0)
    return slowest


class _Row(NamedTuple):
    """A row that stalls more often than the others."""

    row: int
    most_of_others: int  # separate stalls of the worst other row
    hits: NDArray[np.bool_]  # per column
    is_clear: bool  # by the stalls that no burst of other work reaches alone


def _cases(work: Work, policy: Policy) -> Iterator[Stalling]:
    """Yield what is wrong: measured pauses first, then stalls that they do not explain."""
    pauses = work.pause_ms > policy.pause_share * work.usual_ms()[:, None]
    paused = set()
    for row, worst in _stand_out(pauses, policy):
        without = work.own_ms[row] - work.pause_ms[row]
        case = _case(work, _Row(row, worst, pauses[row], is_clear=False), without, policy)
        if case is not None:
            paused.add(row)
            yield case
    if not paused and (case := _of_all(work, pauses, policy)):
        yield case
        return
    for found in _held_up(work, policy):
        case = _case(work, found, _without(work, found), policy)
        if case is not None and case.limit and found.row not in paused:
            paused.add(found.row)
            yield case
    yield from _of_some_steps(work, paused, policy)


def _of_some_steps(
    work: Work, named: Collection[int], policy: Policy, *, rare: bool = False
) -> Iterator[Stalling]:
    """Yield rows that stall while their other steps are usual; of rare stalls the clear ones."""
    for found in _stalling(work, policy):
        row, hits = found.row, found.hits
        if row in named or (rare and not found.is_clear):
            continue
        without = _without(work, found)
        case = _case(work, found, without, policy)
        is_episode = _is_one_episode(work.own_ms[row] - without, policy)
        if (
            case is not None
            and not is_episode
            and _is_calm_between(work.far[row], hits, case, policy)
        ):
            yield case


def _without(work: Work, row: _Row) -> Array:
    """Return the row's self time as it would be without its stalls, ms."""
    own = work.own_ms[row.row]
    usual = median(np.where(row.hits, np.nan, own))
    without: Array = np.where(row.hits, np.fmin(own, usual), own)
    return without


def _held_up(work: Work, policy: Policy) -> Iterator[_Row]:
    """Yield rows that a limit on processor time holds up, and no other one nearly as much.

    The kernel counts that, so long steps are recognized here even where they are frequent.
    """
    shares = np.array(
        [throttled(work.window, row, work.columns)[0] for row in range(len(work.own_ms))]
    )
    for row in np.flatnonzero(shares >= policy.cost_info_ratio).tolist():
        others = np.delete(np.arange(len(shares)), row)
        if not len(others) or policy.stall_multiple * shares[others].max() > shares[row]:
            continue
        own = work.own_ms[row]
        with np.errstate(invalid="ignore"):
            hits = own > policy.limit_step_ratio * median(own)
        if int(hits.sum()) >= policy.stall_least:
            all_hits = np.zeros(work.own_ms.shape, bool)
            all_hits[row] = hits
            all_hits = _apart(work, all_hits, row)
            worst = int(_times(all_hits)[others].max())
            yield _Row(row, worst, all_hits[row], is_clear=True)


def _stalling(work: Work, policy: Policy) -> Iterator[_Row]:
    """Yield the rows that stall more often than the others, by all stalls or by the clear ones.

    Among many small stalls of every row those of one that is many times as slow would be lost.
    """
    least = min(policy.ln_stall_floor, policy.ln_stall_clear)
    if not float(np.fmax.reduce(work.far, axis=None, initial=0.0)) > least:
        return  # the usual case
    sigma = scatter(work.far)
    beyond = policy.stall_sigmas * np.fmax(sigma, median(sigma))
    stalls = _beyond(work, policy.ln_stall_floor, beyond)
    clear = _beyond(work, policy.ln_stall_clear, beyond)
    by_all = dict(_stand_out(stalls, policy))
    by_clear = dict(_stand_out(clear, policy, are_clear=True))
    for row, worst in (by_clear | by_all).items():
        hits = _apart(work, stalls if row in by_all else clear, row)
        if row in dict(_stand_out(hits, policy, are_clear=row not in by_all)):
            yield _Row(row, worst, hits[row], row in by_clear)


def _apart(work: Work, hits: NDArray[np.bool_], row: int) -> NDArray[np.bool_]:
    """Return `hits` with those steps of rows of its role that are as long as the row's stalls.

    What is far from its own usual step in one row may be a usual one of another: on a host where
    much else runs the first steps of one row were short by chance. A step that is so long in both
    at once is a stall of neither: consecutive ones count as one, which favours one row by chance.
    """
    alike = next((rows for rows in work.alone.values() if row in rows), ())
    others = [other for other in alike if other != row]
    if not others:
        return hits
    found = hits.copy()
    with np.errstate(invalid="ignore"):
        as_long = work.own_ms[others] >= np.nanquantile(work.own_ms[row][hits[row]], 0.25)
    found[others] |= as_long
    found[row] &= ~as_long.any(axis=0)
    return found


def _beyond(work: Work, floor: float, level: Array) -> NDArray[np.bool_]:
    """Return which steps are over their reference by their row's level, and by the floor."""
    level = np.fmax(floor, level)
    with np.errstate(invalid="ignore"):
        beyond: NDArray[np.bool_] = work.far > level[:, None]
    return beyond


def _times(hits: NDArray[np.bool_]) -> Array:
    """Return how many separate stalls each row has."""
    before = np.pad(hits[..., :-1], [(0, 0)] * (hits.ndim - 1) + [(1, 0)])
    times: Array = np.sum(hits & ~before, axis=-1)
    return times


def _stand_out(
    hits: NDArray[np.bool_], policy: Policy, *, are_clear: bool = False
) -> Iterator[tuple[int, int]]:
    """Yield (row, stalls of the worst other) of rows that stall more often than chance allows.

    Counts of two rows differ by more than chance where (a - b) / sqrt(a + b) exceeds the cut
    (both Poisson). Clear ones, that no burst of other work reaches, fall on any row alike: fewer of
    them are no chance where nearly all fall on one. A fault on more ranks than the global share at
    once is no rank's.
    """
    times = _times(hits).astype(float)
    cut = outlier_cut(len(times))
    limit = max(1, int(policy.global_share * len(times)))
    order = np.argsort(-times, kind="stable")
    for place, row in enumerate(order[:limit]):
        worst = float(times[order[place + 1 :]].max(initial=0.0))
        mine = float(times[row])
        if mine < policy.stall_least or mine < policy.stall_multiple * worst:
            continue
        is_rare = are_clear and _is_no_chance(
            hits[row], int(mine), int(times.sum()), policy, len(times)
        )
        if is_rare or (mine - worst) / np.sqrt(mine + worst) > cut:
            yield int(row), int(worst)


def _is_no_chance(
    hits: NDArray[np.bool_], mine: int, total: int, policy: Policy, num_rows: int
) -> bool:
    """Return whether so many of all stalls hardly fall on any one of the rows by chance.

    At most rows * C(total, mine) / rows^mine. They must not follow each other in a bad minute.
    """
    at = np.flatnonzero(hits)
    ln_chance = np.log(num_rows) + math.log(math.comb(total, mine)) - mine * np.log(num_rows)
    is_spread = int(at[-1] - at[0]) >= policy.stall_sure_steps
    return is_spread and bool(ln_chance <= np.log(policy.stall_chance))


def _case(work: Work, found: _Row, without: Array, policy: Policy) -> Stalling | None:
    """Return what the stalls of a row amount to; None below the least cost."""
    row, worst, hits, is_clear = found
    begin = _onset(hits)
    last = int(np.flatnonzero(hits)[-1])
    changed = work.own_ms.copy()
    changed[row] = without
    span = slice(begin, last + 1)
    part = Work(
        work.window, work.columns[span], work.own_ms[:, span], work.pause_ms[:, span],
        work.far[:, span], work.step_ms[span], work.alone,
    )  # fmt: skip
    cost = part.lost(changed[:, span])
    if not cost >= policy.cost_silent_ratio:
        return None
    num = int(hits[span].sum())
    every = (last + 1 - begin) / num
    is_over = hits.shape[0] - 1 - last > max(5 * every, policy.long_window)
    table, calm = work.window.steps, ~hits
    usual = float(median(work.own_ms[row][calm])) if calm.any() else float("nan")
    pause = float(work.pause_ms[row][hits].mean())
    extra = float(np.nanmean(work.own_ms[row][hits])) - usual
    seconds = float(np.nansum(_slowest(work.own_ms[:, span]))) / 1e3
    steps = work.steps
    is_pause = pause > policy.stall_pause_share * extra
    limit = limit_of(work.window, row, work.columns[span], num * extra)
    is_sure = is_pause or bool(limit) or is_clear or _is_steady(hits[span], num, worst, policy)
    return Stalling(
        rank=table.ranks[row],
        onset_step=int(steps[begin]),
        last_step=int(steps[last]),
        is_over=is_over,
        num_stalls=num,
        num_steps=last + 1 - begin,
        most_of_others=worst,
        usual_ms=usual,
        extra_ms=extra,
        pause_ms=pause if is_pause else 0.0,
        phase=_phase(work, row, hits),
        limit=limit,
        cost=cost,
        severity=_severity(cost, seconds, policy) if is_sure else "info",
    )


def _is_steady(hits: NDArray[np.bool_], num: int, worst: int, policy: Policy) -> bool:
    """Return whether stalls go on evenly and for long: other work on a host comes in bursts."""
    blocks = np.array_split(hits, max(1, len(hits) // policy.long_window))
    return (
        len(hits) >= policy.stall_sure_steps
        and num >= policy.stall_sure_share * len(hits)
        and num >= policy.stall_sure_multiple * worst
        and float(np.mean([block.any() for block in blocks])) >= policy.consistent_share
    )


def _of_all(work: Work, pauses: NDArray[np.bool_], policy: Policy) -> Stalling | None:
    """Return collector pauses that fall on other steps on each rank, so that all wait for all."""
    if len(pauses) < 2 or np.sum(_times(pauses) >= policy.stall_least) * 2 <= len(pauses):
        return None
    together = np.broadcast_to(work.pause_ms.mean(axis=0), work.pause_ms.shape)
    cost = work.lost(work.own_ms - work.pause_ms + together)
    if not cost >= policy.cost_silent_ratio:
        return None
    columns = np.flatnonzero(pauses.any(axis=0))
    steps = work.steps
    num = int(np.median(pauses.sum(axis=1)))
    seconds = float(np.nansum(_slowest(work.own_ms))) / 1e3
    return Stalling(
        rank=None,
        onset_step=int(steps[columns[0]]),
        last_step=int(steps[columns[-1]]),
        is_over=False,
        num_stalls=num,
        num_steps=work.own_ms.shape[1],
        most_of_others=0,
        usual_ms=float(np.nanmedian(work.own_ms)),
        extra_ms=float(work.pause_ms[pauses].mean()),
        pause_ms=float(work.pause_ms[pauses].mean()),
        phase="other",
        cost=cost,
        severity=_severity(cost, seconds, policy),
    )


def _onset(hits: NDArray[np.bool_]) -> int:
    """Return the column from which the stalls come as often as they do at the end.

    The largest sum, from there on, of what each step is above a quarter of the rate, so that a
    long gap by chance does not end it; twice, because the rate is that since the onset.
    """
    begin = int(np.argmax(hits))
    for _ in range(2):
        rate = float(hits[begin:].mean())
        sums = np.cumsum((hits - rate / 4)[::-1])[::-1]
        begin = int(np.argmax(sums))
    return begin


def _is_calm_between(far: Array, hits: NDArray[np.bool_], case: Stalling, policy: Policy) -> bool:
    """Return whether the other steps are usual ones: else the rank is slow, not stalling."""
    if case.num_stalls > policy.stall_most_share * case.num_steps:
        return False
    between = far[-case.num_steps :][~hits[-case.num_steps :]]
    return bool(np.nanmedian(between) < policy.stall_between_share * np.nanmedian(far[hits]))


def _is_one_episode(excess_ms: Array, policy: Policy) -> bool:
    """Return whether most of the stalled time is one stretch of steps: a slow rank, no stalls."""
    excess = np.nan_to_num(excess_ms)
    edges = np.flatnonzero(np.diff(np.r_[False, excess > 0, False]))
    sums = np.r_[0.0, np.cumsum(excess)]
    return any(
        sums[end] - sums[begin] > policy.stall_episode_share * sums[-1]
        for begin, end in zip(edges[::2], edges[1::2], strict=True)
        if end - begin >= policy.short_window
    )


def _phase(work: Work, row: int, hits: NDArray[np.bool_]) -> str:
    """Return the phase that holds most of what the stalls take."""
    table = work.window.steps
    extra = {}
    for phase in _PHASES:
        values = table.get(phase)[row, work.columns]
        usual = np.nanmedian(values[~hits]) if (~hits).any() else 0.0
        extra[phase] = float(np.nansum(values[hits] - usual))
    return max(extra, key=lambda name: extra[name])


def _severity(cost: float, seconds: float, policy: Policy) -> Severity:
    return severity_of_cost(cost, policy) if seconds >= policy.clear_seconds else "info"
