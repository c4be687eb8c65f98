"""Ranks that have been slower than others of their role since the first step.

Where most of a role is slower, the median is one of them, and what a rank did before shows nothing
of a difference that was always there. Yet that they differ is measured, and so is who waits: the
steps are cut into equal parts, and a difference that is about the same in each of them is none of
chance (batch means; Law and Kelton, Simulation Modeling and Analysis). Which level is the right
one, and why they differ, step times do not say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rankscope.wire.formulas import rank_hours_per_day, throughput_loss
from rankscope_server.diagnose.shared.comparison import do_alike
from rankscope_server.diagnose.shared.gaps import without_calls
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import Evidence, Finding, Severity
from rankscope_server.findings.kinds import MORE_WORK
from rankscope_server.findings.policy import Policy
from rankscope_server.findings.severity import severity_of_cost
from rankscope_server.findings.statistics import Array, median, middle
from rankscope_server.findings.text import (
    capital,
    hours_text,
    ms_text,
    percent_text,
    place_text,
    ranks_text,
    ratio_text,
    seconds_text,
)
from rankscope_server.observe.deviation import Deviation
from rankscope_server.observe.rank_cost import step_times
from rankscope_server.observe.step_table import OWN_PHASES, StepTable

_MAX_CELLS = 1 << 19  # ranks x steps


@dataclass(frozen=True, slots=True)
class Unequal:
    """Rows of a role that are slower than its other rows in all parts of the attempt."""

    slow: list[int]
    quick: list[int]
    columns: Array  # usual ones of which all these rows are known
    sizes: Array  # of each part: ln(self time of the slow rows / of the quick ones)
    cost: float

    @property
    def ratio(self) -> float:
        """Return how many times as long the slow rows work."""
        return float(np.exp(self.sizes.mean()))


def unequal_findings(
    window: Window, deviation: Deviation, named: Collection[int]
) -> tuple[list[Finding], list[str]]:
    """Return findings, and of which ranks it is not known; roles with ranks `named` have theirs."""
    findings, unknown = [], []
    for found in _of_roles(window, deviation, named):
        ranks = _ranks(window, found.slow)
        columns = slice(int(found.columns[0]), int(found.columns[-1]) + 1)
        blind = without_calls(window, ranks, columns)
        if blind and not window.steps.is_thinned()[:, columns].all():
            unknown.append(
                f"{capital(ranks_text(ranks))} may have been slower since the first step, but the "
                f"collectives of {ranks_text(blind)} are not known, those of others are"
            )
        else:
            findings.append(_finding_of(window, found))
    return findings, unknown


def _of_roles(window: Window, deviation: Deviation, named: Collection[int]) -> Iterator[Unequal]:
    table = window.steps
    for rows in deviation.rows_by_role():
        if len(rows) > 1 and not any(table.ranks[row] in named for row in rows):
            found = _unequal(table, deviation, rows, window.policy)
            if found is not None:
                yield found


def _unequal(
    table: StepTable, deviation: Deviation, rows: Sequence[int], policy: Policy
) -> Unequal | None:
    """Return how the rows of a role differ; None by chance, for little, or since a later step."""
    own = table.get("own")
    usual = ~table.special() & table.seen() & ~np.isnan(own[rows]).any(axis=0)
    usual[: deviation.first_column] = False
    columns = np.flatnonzero(usual)
    if len(columns) < policy.unequal_parts * policy.short_window:
        return None
    if not do_alike(table, rows, columns[-policy.recent_steps :]):
        return None
    parts = _parts(columns, len(rows), policy)
    levels = np.log(np.stack([median(own[rows][:, part], 1) for part in parts], axis=1))
    order = np.argsort(levels.mean(axis=1))
    cut = _cut(levels[order].mean(axis=1), policy)
    if not np.isfinite(levels).all() or not _is_steady(levels[order], cut, policy):
        return None
    slow, quick = order[cut:], order[:cut]
    sizes = median(levels[slow], 0) - median(levels[quick], 0)
    least = 1 if np.exp(sizes.mean()) >= policy.company_ratio else policy.unequal_steps
    at = np.array(rows)
    if len(columns) < least or not _is_from_start(table, at[slow], at[quick], sizes, policy):
        return None
    level = float(np.median(levels[quick].mean(axis=1)))
    scales = np.exp(level - levels[slow].mean(axis=1))
    cost = _cost(table, at[slow], at[quick], scales, columns[-policy.cost_steps :], policy)
    if not cost >= policy.cost_info_ratio:
        return None
    return Unequal(sorted(at[slow].tolist()), sorted(at[quick].tolist()), columns, sizes, cost)


def _parts(columns: Array, num_rows: int, policy: Policy) -> list[Array]:
    """Return equal parts of columns, of a large job some of each: medians of all take too long."""
    most = max(policy.unequal_parts * policy.short_window, _MAX_CELLS // num_rows)
    some = np.linspace(0, len(columns) - 1, min(len(columns), most)).astype(int)
    return np.array_split(columns[some], policy.unequal_parts)


def _cut(levels: Array, policy: Policy) -> int:
    """Return how many of ascending levels are the quick ones: before the widest gap."""
    least = max(1, int(np.ceil(policy.unequal_quick_share * len(levels))))
    return least + int(np.argmax(np.diff(levels)[least - 1 :]))


def _is_steady(levels: Array, cut: int, policy: Policy) -> bool:
    """Return whether the gap between both levels is about the same in all parts."""
    gaps = levels[cut] - levels[cut - 1]
    error = float(gaps.std(ddof=1)) / np.sqrt(len(gaps))
    return bool(gaps.mean() > policy.unequal_t * error)


def _is_from_start(
    table: StepTable, slow: Array, quick: Array, sizes: Array, policy: Policy
) -> bool:
    """Return whether they differed by about as much in the first steps of the attempt."""
    least = policy.same_size_share * float(sizes.mean())
    if not table.dropped_steps:
        return bool(sizes[0] >= least)
    first = np.where(table.head_special(), np.nan, table.head("own"))
    own = median(first[:, policy.warmup_max_steps :].astype(float), 1)
    return bool(np.log(middle(own[slow]) / middle(own[quick])) >= least)


def _cost(
    table: StepTable, slow: Array, quick: Array, scales: Array, columns: Array, policy: Policy
) -> float:
    """Return what the job's steps would be shorter by if the slow rows were as quick.

    Nothing where the quick ones do not wait for most of that: they wait for something else, or
    for no rank.
    """
    own = table.get("own")[:, columns].astype(float)
    now = own[np.concatenate([slow, quick])].max(axis=0)
    then = np.fmax((own[slow] * scales[:, None]).max(axis=0), own[quick].max(axis=0))
    waited = median(table.get("blocked")[quick][:, columns].min(axis=0).astype(float))
    if not waited >= policy.waited_share * np.median(now - then):
        return 0.0
    total = step_times(table, columns).astype(float)
    known = ~np.isnan(total)
    whole = float(total[known].sum())
    return throughput_loss(whole, whole - float((now - then)[known].sum())) if whole else 0.0


def _ranks(window: Window, rows: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(window.steps.ranks[row] for row in rows))


def _finding_of(window: Window, found: Unequal) -> Finding:
    slow, quick = _ranks(window, found.slow), _ranks(window, found.quick)
    times = {
        name: tuple(
            _level_ms(window.steps, name, rows, found) for rows in (found.slow, found.quick)
        )
        for name in ("own", *OWN_PHASES)
    }
    given = _given(window, found)
    seconds = _seconds(window.steps, found.columns)
    least_ms = window.policy.evidence_share * times["own"][0]
    is_recording = window.facts.is_recording
    return window.finding(
        "unequal_ranks" if given is None else MORE_WORK,
        f"unequal/{'+'.join(map(str, slow))}",
        detector="balance",
        severity=_severity(window, found, seconds) if given is None else "info",
        ranks=slow,
        onset_step=None if is_recording else int(window.steps.head_steps()[0]),
        cost=found.cost,
        what=_what(window, found, slow, quick, given),
        why=_why(window, found, times, given),
        next=_next(slow, quick, given),
        confidence=_confidence(given, seconds),
        evidence=(
            Evidence(
                f"The slowest of them is rank {_slowest(window, found)}",
                window.link(_slowest(window, found), int(window.steps.steps[found.columns[-1]])),
            ),
            *(
                f"{capital(name)}: {ms_text(one)} a step, of the others {ms_text(other)}"
                for name, (one, other) in times.items()
                if name != "own" and abs(one - other) > least_ms
            ),
        ),
        ruled_out=("Waiting for other ranks: all time blocked on peers is left out of self time",),
        disproof="The ranks are meant to differ: other devices, another share of the work, or "
        "something that only some of them do",
        victims=quick,
    )  # fmt: skip


def _severity(window: Window, found: Unequal, seconds: float) -> Severity:
    """Return info for what other work on a host may make for as long as this was seen."""
    policy = window.policy
    is_clear = found.ratio >= policy.company_ratio and seconds >= policy.persistent_seconds
    is_lasting = is_clear or seconds >= policy.slowdown_seconds
    return severity_of_cost(found.cost, policy) if is_lasting else "info"


def _seconds(table: StepTable, columns: Array) -> float:
    return float(np.nansum(step_times(table, columns))) / 1e3


def _level_ms(table: StepTable, metric: str, rows: Sequence[int], found: Unequal) -> float:
    """Return the median over rows of each one's median, in ms."""
    return middle(median(table.get(metric)[rows][:, found.columns].astype(float), 1))


def _slowest(window: Window, found: Unequal) -> int:
    own = median(window.steps.get("own")[found.slow][:, found.columns].astype(float), 1)
    return window.steps.ranks[found.slow[int(np.argmax(own))]]


def _given(window: Window, found: Unequal) -> tuple[float, float] | None:
    """Return the tokens a step of slow and quick ranks where they explain the difference."""
    first, last = (int(window.steps.steps[found.columns[at]]) for at in (0, -1))
    means = []
    for rows in (found.slow, found.quick):
        given = [window.work.mean(rank, first, last) for rank in _ranks(window, rows)]
        known = [mean for mean in given if mean is not None]
        if 2 * len(known) <= len(rows):
            return None
        means.append(float(np.median(known)))
    slow, quick = means
    excess = slow - quick
    is_most = excess >= window.policy.min_explained_share * (found.ratio - 1) * quick
    return (slow, quick) if quick > 0 and is_most else None


def _what(
    window: Window,
    found: Unequal,
    slow: tuple[int, ...],
    quick: tuple[int, ...],
    given: tuple[float, float] | None,
) -> str:
    since = "in all steps compared" if window.facts.is_recording else "since the first step"
    who, whom = window.who(slow), ranks_text(quick)
    if given is not None:
        were = "were" if len(slow) > 1 else "was"
        return f"{who} {were} given {ratio_text(given[0] / given[1])} the tokens of {whom} {since}"
    have = "have" if len(slow) > 1 else "has"
    by = found.ratio
    slower = ratio_text(by) if by >= window.policy.company_ratio else percent_text(by - 1)
    table = window.steps
    waits, others = (_level_ms(table, "blocked", rows, found) for rows in (found.quick, found.slow))
    share = percent_text((waits - others) / middle(step_times(table, found.columns)))
    wait = "those wait" if len(quick) > 1 else "that one waits"
    return (
        f"{who} {have} been {slower} slower than {whom} {since}; {wait} {share} of the time for it"
    )


def _why(
    window: Window,
    found: Unequal,
    times: dict[str, tuple[float, ...]],
    given: tuple[float, float] | None,
) -> str:
    own, other = times["own"]
    step = middle(step_times(window.steps, found.columns[-window.policy.cost_steps :]))
    least, most = (float(np.expm1(size)) for size in (found.sizes.min(), found.sizes.max()))
    phase = max(OWN_PHASES, key=lambda name: times[name][0] - times[name][1])
    hours = rank_hours_per_day(window.world_size, found.cost)
    cause = (
        "Other hardware, other work or a fault: step times alone do not say which"
        if given is None
        else f"They were given {given[0]:,.0f} tokens a step, the others {given[1]:,.0f}"
    )
    return (
        f"{ms_text(own)} a step without waiting for others, against {ms_text(other)}, most of it "
        f"in {'waiting for data' if phase == 'data' else phase}; in each of {len(found.sizes)} "
        f"equal parts of {len(found.columns):,} steps it is {percent_text(least)} to "
        f"{percent_text(most)} more. {cause}. The job's step takes {ms_text(step)}, about "
        f"{ms_text(step * (1 - found.cost))} if all were as quick: {window.world_size} ranks lose "
        f"{percent_text(found.cost)} of their throughput, {hours_text(hours)} a day"
    )


def _next(slow: tuple[int, ...], quick: tuple[int, ...], given: tuple[float, float] | None) -> str:
    if given is not None:
        return (
            "Give ranks batches of equal length: sort or pack samples by length across ranks, or "
            "cut a step by tokens and not by samples"
        )
    return (
        f"Compare {place_text(slow[:1], ())} with {place_text(quick[:1], ())}: devices and their "
        "clocks, the processors that each may use, what each is given to do; `rankscope preflight` "
        "measures the hosts"
    )


def _confidence(given: tuple[float, float] | None, seconds: float) -> tuple[float, str]:
    if given is not None:
        return 0.85, "the tokens of the ranks explain their times"
    return 0.7, (
        f"the difference is measured over {seconds_text(seconds)}; which speed is the expected "
        "one is not known"
    )
