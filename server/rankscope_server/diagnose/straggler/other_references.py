"""Slow ranks that neither their peers nor their own steps before show, by who waits for whom.

Two or three ranks of a role, slow from the first steps on: so few are compared with their own steps
before, which show nothing of a rank whose steps were never better. But the others are done
earlier, and wait for it. And most ranks of a role that became slower together, while a few did not:
compared with their peers they look as before, and the few look fast. Compared with their own steps
before, its ranks split into those that became slower and those that did not and wait. Where all
did, none is named.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from rankscope.wire.formulas import throughput_loss
from rankscope_server.diagnose.shared.comparison import do_alike
from rankscope_server.diagnose.straggler.case import Case
from rankscope_server.diagnose.straggler.events import lasts, seconds_of
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.policy import Policy
from rankscope_server.findings.severity import severity_of_cost
from rankscope_server.findings.statistics import Array, median, middle
from rankscope_server.observe.deviation import Deviation
from rankscope_server.observe.episodes import Episode, turning_point
from rankscope_server.observe.rank_cost import Cost, Excess, excess_between, step_times
from rankscope_server.observe.step_table import StepTable


@dataclass(frozen=True, slots=True)
class _Group:
    """The ranks of one role: who is the slowest lately, and the columns that were looked at."""

    row: int
    others: list[int]
    columns: Array  # usual ones of which all its rows are known
    recent: Array  # the newest of these


def slow_from_start(window: Window, deviation: Deviation, named: Collection[int]) -> list[Case]:
    """Return the ranks of small roles that the others wait for, without the rows of `named`."""
    cases = []
    for rows in deviation.rows_by_role():
        if len(rows) < 2 or deviation.peers[rows].all():
            continue
        group = _group_of(window.steps, deviation, rows, window.policy)
        case = _case(window, group) if group is not None and group.row not in named else None
        if case is not None:
            cases.append(case)
    return cases


def is_outdone(
    table: StepTable, deviation: Deviation, episode: Episode, slow: Collection[int]
) -> bool:
    """Return whether a rank with too few peers works no longer than another one of its role.

    It is compared with its own steps before, and may have become slower: the job waits for the
    other one all the same. The rows of `slow`, which have episodes meanwhile, do not count.
    """
    if deviation.peers[episode.row]:
        return False
    own = table.get("own")[:, episode.columns]
    return any(
        role == deviation.roles[episode.row]
        and row not in slow
        and middle(own[row]) >= middle(own[episode.row])
        for row, role in enumerate(deviation.roles)
    )


def _group_of(
    table: StepTable, deviation: Deviation, rows: list[int], policy: Policy
) -> _Group | None:
    own = table.get("own")[rows]
    usual = ~table.special() & table.seen() & ~np.isnan(own).any(axis=0)
    usual[: deviation.first_column] = False
    columns = np.flatnonzero(usual)
    if len(columns) < policy.huge_steps:
        return None
    recent = columns[-policy.recent_steps :]
    if not do_alike(table, rows, recent):
        return None
    slowest = int(np.argmax(np.median(own[:, recent], axis=1)))
    return _Group(rows[slowest], [row for row in rows if row != rows[slowest]], columns, recent)


def _case(window: Window, group: _Group) -> Case | None:
    """Return what holds the others up; None if it is small, short, or no rank waits for it."""
    table, policy = window.steps, window.policy
    episode = _episode_of(table, group, policy)
    if episode is None:
        return None
    inside = group.columns[group.columns >= episode.first][-policy.cost_steps :]
    cost = _cost_of(table, group, inside, policy)
    if not cost.ratio >= policy.cost_silent_ratio:
        return None
    excess = excess_between(
        lambda name: of_rows(table, name, [group.row], inside),
        lambda name: of_rows(table, name, group.others, inside),
    )
    rank = table.ranks[group.row]
    return open_case(
        window, (rank,), episode, excess, cost, len(group.others), has_peers=True,
        is_throughout=window.facts.is_recording and episode.first <= int(group.columns[0]),
    )  # fmt: skip


def of_each(table: StepTable, metric: str, rows: Sequence[int], columns: Array) -> Array:
    """Return the median of each row over columns, in ms."""
    each: Array = median(table.get(metric)[np.ix_(np.array(rows), columns)].astype(float), 1)
    return each


def of_rows(table: StepTable, metric: str, rows: Sequence[int], columns: Array) -> float:
    """Return the median over columns of the median row, in ms."""
    return middle(median(table.get(metric)[np.ix_(np.array(rows), columns)].astype(float), 0))


def open_case(
    window: Window,
    ranks: tuple[int, ...],
    episode: Episode,
    excess: Excess,
    cost: Cost,
    num_others: int,
    *,
    has_peers: bool,
    is_throughout: bool = False,
) -> Case:
    """Return the case of ranks that are slow now, by the worst one's episode, with no company."""
    table, policy = window.steps, window.policy
    is_lasting = lasts(table, episode, policy)
    is_data = excess.by_phase["data"] > 0.5 * excess.total_ms
    ratio = float(np.exp(episode.size))
    return Case(
        kind="slow_data" if is_data else "slow_compute",
        ranks=ranks,
        worst_rank=table.ranks[episode.row],
        episode=episode,
        columns=episode.columns,
        onset_step=int(table.steps[episode.first]),
        is_throughout=is_throughout,
        ended_step=None,
        seconds=seconds_of(table, episode.columns),
        is_lasting=is_lasting,
        has_peers=has_peers,
        num_peers=num_others,
        excess=excess,
        ratio=excess.ratio_or(ratio) if len(ranks) == 1 else ratio,
        cost=cost,
        company={},
        severity=severity_of_cost(cost.sure, policy) if is_lasting else "info",
    )


def open_episode(row: int, columns: Array, raw: Array, size: float, policy: Policy) -> Episode:
    """Return the episode of a row over `columns`; `raw` is ln(work / reference) in each of them."""
    return Episode(
        view="own",
        row=row,
        first=int(columns[0]),
        last=int(columns[-1]),
        ended=False,
        size=size,
        consistent=float(np.mean(raw > size / 2)),
        strength=size / policy.ln_entry_floor,
    )


def _episode_of(table: StepTable, group: _Group, policy: Policy) -> Episode | None:
    """Return since when it is slower than the slowest other, by as much as it is lately."""
    own = table.get("own")
    others = own[group.others][:, group.columns].max(axis=0)
    with np.errstate(divide="ignore"):
        raw = np.log(own[group.row, group.columns] / others)
    size = middle(raw[-len(group.recent) :])
    if not np.log(policy.company_ratio) <= size < np.inf:
        return None
    first = turning_point(raw, 0.0, size)
    return open_episode(group.row, group.columns[first:], raw[first:], size, policy)


def _cost_of(table: StepTable, group: _Group, columns: Array, policy: Policy) -> Cost:
    """Return what the others really waited, of what it is later than the slowest of them."""
    own = table.get("own")
    late = own[group.row, columns] - own[group.others][:, columns].max(axis=0)
    late = np.fmax(late.astype(float), 0.0)
    waited = table.get("blocked")[group.others][:, columns].min(axis=0).astype(float)
    step = step_times(table, columns)
    known = ~np.isnan(step) & ~np.isnan(waited)
    if not known.any() or middle(waited) < policy.waited_share * middle(late):
        return Cost(0.0, 0.0, float("nan"), None)
    ratio = float(np.fmin(late, waited)[known].sum() / step[known].sum())
    return Cost(ratio, ratio, middle(step), None)


@dataclass(frozen=True, slots=True)
class _Before:
    """Columns of usual steps before the job became slower: of the table, or of its head."""

    columns: Array
    is_head: bool = False

    def cells(self, table: StepTable, metric: str) -> Array:
        """Return a metric of these steps, ranks x steps, in ms."""
        cells = table.head(metric) if self.is_head else table.get(metric)
        return cells[:, self.columns].astype(float)

    def of_rows(self, table: StepTable, metric: str, rows: Sequence[int]) -> float:
        """Return the median over the steps of the median row, in ms."""
        return middle(median(self.cells(table, metric)[rows], 0))


@dataclass(frozen=True, slots=True)
class _Split:
    """Rows that became slower and rows that did not, with the columns before and since."""

    slow: list[int]
    calm: list[int]
    worst: int  # the slow row that became slower by most
    rise: float  # ln(self time since / before) of that row
    before: _Before
    since: Array  # from the onset on


def slow_majority(window: Window, deviation: Deviation, named: Collection[int]) -> list[Case]:
    """Return groups of more than half of a role that became slower; none of a role in `named`."""
    cases = []
    for rows in deviation.rows_by_role():
        if len(rows) < 3 or not set(rows).isdisjoint(named):
            continue
        split = _split(window.steps, deviation, rows, window.policy)
        case = _case_of_split(window, split) if split is not None else None
        if case is not None:
            cases.append(case)
    return cases


def _split(
    table: StepTable, deviation: Deviation, rows: list[int], policy: Policy
) -> _Split | None:
    """Return how the rows of a role differ since the job became slower, None where they do not.

    Where all that the table holds is as slow, the steps before are the first of the attempt.
    """
    usual = ~table.special() & table.seen()
    usual[: deviation.first_column] = False
    columns = np.flatnonzero(usual)
    if len(columns) < policy.baseline_min_steps + policy.persistent_steps:
        return None
    step = step_times(table, columns)
    calm = middle(step[: policy.baseline_min_steps])
    lately = middle(step[-policy.persistent_steps :])
    if np.log(lately / calm) > policy.ln_entry_floor:
        onset = turning_point(np.log(step / calm), 0.0, float(np.log(lately / calm)))
        if onset < policy.healthy_min_steps or len(columns) - onset < policy.persistent_steps:
            return None
        before = _Before(columns[:onset][-policy.healthy_long_steps :])
        return _split_at(table, rows, before, columns[onset:], policy)
    if not table.dropped_steps:
        return None
    first = np.flatnonzero(~table.head_special())
    before = _Before(first[first >= policy.warmup_max_steps], is_head=True)
    if len(before.columns) < policy.baseline_min_steps:
        return None
    calm = middle(median(before.cells(table, "duration")[table.some_rows()], 0))
    if not np.log(lately / calm) > policy.ln_entry_floor:
        return None
    return _split_at(table, rows, before, columns, policy)


def _split_at(
    table: StepTable, rows: list[int], before: _Before, since: Array, policy: Policy
) -> _Split | None:
    """Return which of the rows became slower, None where not most of them did, or all."""
    then = median(before.cells(table, "own")[rows], 1)
    rises = np.log(of_each(table, "own", rows, since[-policy.cost_steps :]) / then)
    order = np.argsort(rises)
    gaps = np.diff(rises[order])
    if np.isnan(gaps).any():
        return None
    cut = int(np.argmax(gaps)) + 1
    slow, quiet = order[cut:], order[:cut]
    least = float(rises[slow[0]])
    if 2 * len(slow) <= len(rows) or least < np.log(policy.company_ratio):
        return None  # fewer than that are compared with their peers
    if float(rises[quiet[-1]]) > policy.as_before_share * least:
        return None
    at = np.array(rows)
    return _Split(
        at[slow].tolist(), at[quiet].tolist(), int(at[slow[-1]]), float(rises[slow[-1]]), before,
        since,
    )  # fmt: skip


def _case_of_split(window: Window, split: _Split) -> Case | None:
    """Return what they cost; None where it is little, or the others do not wait for them."""
    table, policy = window.steps, window.policy
    lately = split.since[-policy.cost_steps :]
    cost = _cost_of_split(table, split, lately, policy)
    if cost is None or not cost.sure >= policy.cost_silent_ratio:
        return None
    excess = excess_between(
        lambda name: of_rows(table, name, split.slow, lately),
        lambda name: split.before.of_rows(table, name, split.slow),
    )
    ranks = tuple(sorted(table.ranks[row] for row in split.slow))
    own = table.get("own")[split.worst]
    rose = np.log(own[split.since] / split.before.of_rows(table, "own", [split.worst]))
    episode = open_episode(split.worst, split.since, rose, split.rise, policy)
    return open_case(window, ranks, episode, excess, cost, len(split.calm), has_peers=False)


def _cost_of_split(table: StepTable, split: _Split, lately: Array, policy: Policy) -> Cost | None:
    """Return what the job's steps lost, None where the calm ranks do not wait for the others."""

    def rise_ms(metric: str, rows: list[int]) -> Array:
        before = median(split.before.cells(table, metric)[rows], 1)
        return of_each(table, metric, rows, lately) - before

    later_ms = float(np.median(rise_ms("own", split.slow)))
    if float(rise_ms("blocked", split.calm).min()) < policy.waited_share * later_ms:
        return None
    now = middle(step_times(table, lately))
    then = middle(median(split.before.cells(table, "duration")[table.some_rows()], 0))
    ratio = throughput_loss(now, then)
    return Cost(ratio, ratio, now, then)
