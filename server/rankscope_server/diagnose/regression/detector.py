"""Slower than earlier runs of the same job, or than the same run was before."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np

from rankscope.wire.formulas import SIGMA_PER_MAD
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import DetectorResult, Evidence, Finding, Level, ran, skipped
from rankscope_server.findings.policy import Policy
from rankscope_server.findings.severity import severity_of_cost
from rankscope_server.findings.statistics import Array, median
from rankscope_server.findings.text import (
    capital,
    cut,
    ms_text,
    percent_text,
    ranks_text,
    seconds_text,
    times_text,
)
from rankscope_server.observe.baseline import MAX_TIMES, PHASES, RunSummary, mann_whitney_p
from rankscope_server.observe.deviation import usual_steps
from rankscope_server.observe.environment_rules import kind_of, level_of
from rankscope_server.observe.number_table import HEAD
from rankscope_server.observe.step_table import PAST_BLOCKS, StepTable

_WITHIN = "within"  # the name of the finding on a change within the run
_NO_PAST = np.zeros((0, 3))
_SHOWN = 4  # ranks in the evidence
_WORDS = {"blocked": "waiting for other ranks and communication", "other": "time outside phases"}


@dataclass(frozen=True, slots=True)
class Slower:
    """This run against earlier ones. Ratios are of times: 0.041 is 4.1 % longer."""

    now: RunSummary
    base_ms: float
    rise: float
    limit: float
    p: float
    num_runs: int
    phases: dict[str, float]  # ms more than before
    changed: tuple[tuple[str, str, str], ...]  # fact, then, now


@dataclass(frozen=True, slots=True)
class StepSlowdown:
    """A change within a run that lasts. `step` is the first slow one."""

    step: int
    rise: float
    before_ms: float
    after_ms: float
    is_gradual: bool
    strength: float  # in sigma of a block
    seconds: float  # that it lasts; of a gradual change, the whole run


class Regression:
    """Finds runs that are slower than earlier runs of the same job, or than they were before."""

    name: ClassVar[str] = "regression"
    finds: ClassVar[str] = (
        "Runs slower than earlier ones with the same command, or than they were before"
    )
    needs: ClassVar[str] = "30 steady steps"
    silent: ClassVar[str] = "no earlier run; another number of tokens is compared by token"

    def look(self, window: Window) -> DetectorResult:
        """Return whether the run is slower than it should be."""
        policy = window.policy
        now = summary_of(window)
        steps, times = steady(window)
        past, has_more = past_of(window.steps), partial(_has_more_tokens, window)
        rise = rise_of(past, steps, times, policy, has_more)
        if now is None and not rise:
            return skipped(self, f"needs {policy.steady_steps} steady steps", "wait")
        if now is None:
            return ran(self, not_known=(rise,))
        findings: list[Finding] = []
        earlier = [run for run in window.earlier if run.run_id != window.run_id]
        slower = slower_than(now, earlier, policy)
        if slower is not None:
            findings.append(regression_finding(window, slower))
        slowdown = slowdown_of(steps, times, policy, past)
        if slowdown is not None and not has_more(slowdown.step, slowdown.rise):
            findings.append(slowdown_finding(window, _since_before(window, slowdown)))
        note = "" if earlier else "no earlier run with this command to compare with"
        checked = () if findings or not earlier else (f"step time of {len(earlier)} earlier runs",)
        return ran(self, findings, checked, note, not_known=(rise,) * bool(rise))


def steady(window: Window) -> tuple[Array, Array]:
    """Return steps and their times in ms, without warm-up and special steps."""
    table = window.steps
    durations = table.get("duration")[table.some_rows()].astype(float)
    times = median(durations, 0) if len(durations) else np.zeros(0)
    good = usual_steps(table, window.policy, are_most_special=True) & ~np.isnan(times)
    return table.steps[good], times[good]


def summary_of(window: Window) -> RunSummary | None:
    """Return what later runs are compared with; None for too few steady steps."""
    steps, times = steady(window)
    if len(times) < window.policy.steady_steps:
        return None
    table = window.steps
    columns = np.flatnonzero(np.isin(table.steps, steps[-MAX_TIMES:]))
    phases = {}
    for name in PHASES:
        usual = median(table.get(name)[table.some_rows(), columns].astype(float), 0)
        if not np.isnan(usual).all():  # waits of no rank may be known
            phases[name] = float(np.nanmean(usual))
    facts = dict(next(iter(window.facts.environments.records.values())).facts) if (
        window.facts.environments.records
    ) else {}  # fmt: skip
    tokens = window.facts.numbers.typical("tokens")[1]
    per_step = float(np.median(tokens)) * window.world_size if len(tokens) else None
    recent = times[-MAX_TIMES:]
    return RunSummary(window.run_id, (), float(np.median(recent)), phases, recent, facts, per_step)


def slower_than(now: RunSummary, earlier: Sequence[RunSummary], policy: Policy) -> Slower | None:
    """Return by how much a run is slower than earlier ones, None where it is not.

    The rise must exceed 2 %, what chance does to one more run, and what it does to single steps;
    with one earlier run 5 %. Runs with another number of tokens are compared by token.
    """
    usable = [run for run in earlier if len(run.times_ms) >= policy.steady_steps]
    usable = usable[-policy.baseline_runs :]
    if not usable:
        return None
    scales = [_scale(now, run) for run in usable]
    medians = np.array([run.step_ms * scale for run, scale in zip(usable, scales, strict=True)])
    base = float(np.median(medians))
    rise = now.step_ms / base - 1.0
    limit = policy.regression_one_run
    if len(medians) > 1:
        sigma = float(np.std(medians, ddof=1)) / base
        few = max(0, policy.regression_min_runs - len(medians))
        least = policy.regression_share * (1.0 + 0.5 * few)
        limit = max(least, _chance_limit(len(medians), policy) * sigma)
    if rise <= limit:
        return None
    times = np.concatenate(
        [run.times_ms * scale for run, scale in zip(usable, scales, strict=True)]
    )
    p = mann_whitney_p(times, now.times_ms)
    if p >= policy.regression_p:
        return None
    last, scale = usable[-1], scales[-1]
    phases = {
        name: now.phases_ms[name] - last.phases_ms[name] * scale
        for name in PHASES
        if name in now.phases_ms and name in last.phases_ms
    }
    return Slower(now, base, rise, limit, p, len(usable), phases, _changed(last, now))


def _chance_limit(num_runs: int, policy: Policy) -> float:
    """Return how many sigma, estimated from some runs, one more run exceeds by chance seldom."""
    freedom = min(num_runs - 1, len(policy.regression_t))
    return policy.regression_t[freedom - 1] * math.sqrt(1 + 1 / num_runs)


def _scale(now: RunSummary, earlier: RunSummary) -> float:
    """Return by what the earlier times are multiplied: more tokens a step take longer."""
    if now.tokens and earlier.tokens and abs(now.tokens / earlier.tokens - 1) > 0.01:
        return now.tokens / earlier.tokens
    return 1.0


def _changed(then: RunSummary, now: RunSummary) -> tuple[tuple[str, str, str], ...]:
    """Return the facts that differ between two runs and may matter, versions first."""
    found = [
        (fact, then.facts[fact], now.facts[fact])
        for fact in sorted(then.facts.keys() & now.facts.keys())
        if then.facts[fact] != now.facts[fact]
        and (level_of(fact) in ("critical", "warning") or fact.startswith("dataset."))
    ]
    return tuple(sorted(found, key=lambda one: (kind_of(one[0]) != "version", one[0])))


def _tokens_of(window: Window) -> tuple[Array, Array]:
    """Return of which steps it is known how many tokens a rank was given, first and newest ones.

    And how many, the median over ranks.
    """
    numbers = window.facts.numbers
    newest, recent, _ = numbers.typical("tokens")
    first = [step for step in numbers.head("tokens") if not len(newest) or step < newest[0]]
    early = median(numbers.matrix("tokens", first), 0) if first else np.zeros(0)
    steps, tokens = np.concatenate([np.array(first, int), newest]), np.concatenate([early, recent])
    known = ~np.isnan(tokens)
    return steps[known], tokens[known]


def _has_more_tokens(window: Window, step: int, rise: float) -> bool:
    """Return whether most of a rise of the time since a step is more tokens since then.

    Where too few steps are known on one side of it, as of a gradual rise, the first ones that are
    known are compared with the newest.
    """
    policy = window.policy
    steps, tokens = _tokens_of(window)
    at, fewest = int(np.searchsorted(steps, step)), policy.tokens_least_steps
    if len(steps) < 2 * fewest:
        return False
    before, since = tokens[:at], tokens[at:]
    if min(len(before), len(since)) < fewest:
        num = min(HEAD, len(steps) // 2)
        before, since = tokens[:num], tokens[-num:]
    change = np.log(max(float(np.median(since)), 1e-9) / max(float(np.median(before)), 1e-9))
    is_most = bool(change >= policy.min_explained_share * np.log1p(rise))
    return is_most and mann_whitney_p(before, since) < policy.regression_p


def past_of(table: StepTable) -> Array:
    """Return the blocks of the steps before the table; none where special steps count in it."""
    is_comparable = table.num_steps and float(table.special().mean()) <= 0.5
    return table.past.blocks if is_comparable else _NO_PAST


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Consecutive steps by the logarithm of a usual one; those of the past are coarser."""

    logs: Array
    first_steps: Array
    num_steps: Array
    seconds: Array
    num_past: int

    @property
    def places(self) -> Array:
        """Return how many blocks of the table's length are before each."""
        places: Array = (np.cumsum(self.num_steps) - self.num_steps) / self.num_steps[-1]
        return places


def _blocks_of(past: Array, steps: Array, times: Array, policy: Policy) -> _Blocks:
    """Return the blocks of all steps of which the time is known.

    Of the past only means are known: of three blocks the middle one, so that a single pause does
    not count. Where most steps of the table are longer than their mean, so were those before:
    lifted by that, a mean is at least a median and no job looks slower than it was.
    """
    size = policy.slowdown_block
    count = len(times) // size
    left = len(times) - count * size
    kept = times[left:].reshape(count, size)
    medians = np.median(kept, axis=1)
    lift = max(1.0, float(np.median(medians / kept.mean(axis=1))))
    groups, each_ms = [], past[:, 2] / np.fmax(past[:, 1], 1.0)
    begin = 0
    for end in range(1, len(past) + 1):
        if end - begin >= 3 and past[begin:end, 1].sum() >= size:
            part = past[begin:end]
            groups.append((float(np.median(each_ms[begin:end])), part[0, 0], *part[:, 1:].sum(0)))
            begin = end
    early = np.array(groups).reshape(-1, 4)
    return _Blocks(
        np.log(np.concatenate([early[:, 0] * lift, medians])),
        np.concatenate([early[:, 1], steps[left::size]]).astype(int),
        np.concatenate([early[:, 2], np.full(count, float(size))]),
        np.concatenate([early[:, 3], kept.sum(axis=1)]) / 1e3,
        len(early),
    )


def slowdown_of(
    steps: Array, times: Array, policy: Policy, past: Array = _NO_PAST
) -> StepSlowdown | None:
    """Return a lasting change of the step time within a run; None where it is flat.

    Medians of blocks of 40 steps as logarithms; one step and one straight line are fitted, the
    better one says which it is. The change must stand out of how blocks scatter. A step close to
    an end is no line either, even where it is too close to exceed chance. `past` are blocks of
    the steps before.
    """
    size, side = policy.slowdown_block, policy.slowdown_side_blocks
    if len(times) // size < 2 * side:
        return None
    all_blocks = _blocks_of(past, steps, times, policy)
    blocks, places = all_blocks.logs, all_blocks.places
    at, step_error = _best_split(blocks, policy.slowdown_before_blocks, side)
    at_any, any_error = _best_split(blocks, 1, 1)
    slope, start = np.polyfit(places, blocks, 1)
    line_error = float(np.sum((blocks - (slope * places + start)) ** 2))
    if at_any != at and any_error < min(step_error, line_error):
        return None
    gradual = line_error < step_error
    before, after = float(np.median(blocks[:at])), float(np.median(blocks[at:]))
    size_ln = float(slope * places[-1]) if gradual else after - before
    levels = np.repeat([before, after], [at, len(blocks) - at])
    best = slope * places + start if gradual else levels
    if np.median(blocks[-side:]) < (best[0] + best[-1]) / 2:
        return None  # it is over
    rest = blocks - best
    # Blocks that hang together scatter more than their neighbours show: both count.
    near = SIGMA_PER_MAD * float(np.median(np.abs(np.diff(rest)))) / np.sqrt(2.0)
    sigma = max(near, float(np.std(rest)), 1e-4)
    strength = size_ln / sigma
    if size_ln <= np.log1p(policy.slowdown_share) or strength < policy.slowdown_sigmas:
        return None
    rise, first_steps = float(np.expm1(size_ln)), all_blocks.first_steps
    if gradual:
        low, high = float(np.exp(start)), float(np.exp(start + size_ln))
        seconds = float(all_blocks.seconds.sum())
        return StepSlowdown(int(first_steps[0]), rise, low, high, True, strength, seconds)
    before_ms, after_ms = float(np.exp(before)), float(np.exp(after))
    if at < all_blocks.num_past:
        seconds = float(all_blocks.seconds[at:].sum())
        return StepSlowdown(
            int(first_steps[at]), rise, before_ms, after_ms, False, strength, seconds
        )
    turn = _turning_step(
        np.log(times), len(times) % size + (at - all_blocks.num_past) * size, size, before, after
    )
    return StepSlowdown(
        int(steps[turn]),
        rise,
        before_ms,
        after_ms,
        False,
        strength,
        float(times[turn:].sum()) / 1e3,
    )


def _since_before(window: Window, change: StepSlowdown) -> StepSlowdown:
    """Return the change with the step that was seen when it was in the table."""
    old = window.before.get(f"{window.attempt}/{Regression.name}/{_WITHIN}")
    if old is None or old.onset_step is None or change.is_gradual or old.state != "open":
        return change
    is_past = max(change.step, old.onset_step) < window.steps.steps[0]
    # Twice as many steps as three of the blocks that the past has at least.
    near = max(2 * window.policy.slowdown_block, 12 * window.steps.dropped_steps // PAST_BLOCKS)
    is_same = abs(change.step - old.onset_step) <= near
    return replace(change, step=old.onset_step) if is_past and is_same else change


def _turning_step(logs: Array, near: int, reach: int, before: float, after: float) -> int:
    """Return the place within `reach` of `near` from which on times are at `after`.

    Blocks end with the newest step, so where they divide moves with each step; this does not.
    """
    first, stop = max(0, near - reach), min(len(logs) - 1, near + reach)
    part = logs[first:stop]
    worse = np.abs(part - before) - np.abs(part - after)  # of counting a step as before
    return first + int(np.argmin(np.concatenate([[0.0], np.cumsum(worse)])))


def _never(_step: int, _rise: float) -> bool:
    return False


def rise_of(
    past: Array,
    steps: Array,
    times: Array,
    policy: Policy,
    is_explained: Callable[[int, float], bool] = _never,
) -> str:
    """Return since when the whole job takes much longer than before, in words; empty: it does not.

    Means of short blocks, as one long step in ten costs as much as ten that are a little longer;
    medians too where all blocks are at hand, as a single pause lifts the mean of a block before.
    `past` are blocks of the steps before; `is_explained` says whether a rise since a step is
    accounted for.
    """
    parts = _parts(times, policy)
    if not parts:
        return ""
    first_steps = steps[len(steps) - np.cumsum([len(part) for part in parts[::-1]])[::-1]]
    recent = np.array([
        [first, len(part), part.sum()] for first, part in zip(first_steps, parts, strict=True)
    ])  # fmt: skip
    blocks = np.concatenate([past, recent])
    num_lasting = int(np.sum(np.cumsum(blocks[::-1, 2]) >= 1e3 * policy.rise_seconds))
    looks = [blocks[:, 2] / blocks[:, 1]]
    if not len(past):
        looks.append(np.array([np.median(part) for part in parts]))
    for each_ms in looks:
        since, before = _rise_at(each_ms, num_lasting, policy)
        if since:
            first, after = blocks[since, 0], float(np.median(each_ms[since:]))
            near = int(np.searchsorted(steps, first))
            is_usual = float(np.median(times[near:])) > np.sqrt(before * after)
            if first >= steps[0] and is_usual:  # else some long steps among many as before
                reach, logs = int(2 * blocks[since, 1]), np.log(np.fmax(times, 1e-6))
                first = steps[_turning_step(logs, near, reach, np.log(before), np.log(after))]
            if is_explained(int(first), after / before - 1.0):
                continue
            return (
                f"since about step {int(first):,} a step takes {times_text(after / before)} as "
                f"long as before ({ms_text(after)}, {ms_text(before)} before), and why is not known"
            )
    return ""


def _parts(times: Array, policy: Policy) -> list[Array]:
    """Return the newest times in blocks of one size; before them one that holds half of it."""
    usual_ms = max(float(np.median(times)), 1e-3) if len(times) else 1.0
    size = max(policy.rise_block, int(1e3 * policy.rise_block_seconds / usual_ms))
    left = len(times) % size
    begin = 0 if 2 * left >= size else left
    starts = np.arange(left, len(times), size)
    return [part for part in np.split(times[begin:], starts - begin) if len(part)]


def _rise_at(each_ms: Array, num_lasting: int, policy: Policy) -> tuple[int, float]:
    """Return the first of the first blocks from which on all are much longer, and what was usual.

    Longer than nearly all before, but the last, in which the rise may have begun; 0: there is none.
    """
    lowest = np.minimum.accumulate(each_ms[::-1])[::-1]
    for since in range(1, num_lasting):
        before = float(np.quantile(each_ms[: max(1, since - 1)], 0.9))
        if lowest[since] >= policy.rise_ratio * before:
            return since, before
    return 0, 0.0


def _best_split(blocks: Array, before: int, after: int) -> tuple[int, float]:
    """Return where two levels fit the blocks best, and the squared error that is left.

    With at least so many blocks before and after it.
    """
    errors = [
        float(np.var(blocks[:at]) * at + np.var(blocks[at:]) * (len(blocks) - at))
        for at in range(before, len(blocks) - after + 1)
    ]
    best = int(np.argmin(errors))
    return before + best, errors[best]


@dataclass(frozen=True, slots=True)
class Lead:
    """What changed with it, and where to look therefore."""

    evidence: tuple[Evidence, ...] = ()
    next: str = ""
    command: str = ""


def lead_of(window: Window, change: StepSlowdown) -> Lead:
    """Return which ranks' other threads, or lack of a processor, are most of the rise.

    A lead where no rank is to blame: ranks that share processors slow each other, so that all of
    them are slower and none stands out.
    """
    more_ms = (change.after_ms - change.before_ms) * window.policy.min_explained_share
    busy = _busier(window, change.step, more_ms)
    held = _held(window, change, more_ms)
    evidence = [
        Evidence(
            f"Other threads of rank {rank} take {ms_text(after)} of processor time a step since "
            f"then, {ms_text(before)} before", window.link(rank, change.step)
        )
        for rank, (before, after) in list(busy.items())[:_SHOWN]
    ]  # fmt: skip
    evidence += [
        Evidence(
            f"Rank {rank} was ready to run and had no processor for {percent_text(after)} of the "
            f"time since then, {percent_text(before)} before"
        )
        for rank, (before, after) in list(held.items())[:_SHOWN]
    ]
    if busy:
        known = window.ranks.get(next(iter(busy)))
        return Lead(
            tuple(evidence),
            f"Look first at what the other threads of {ranks_text(sorted(busy))} do since step "
            f"{change.step:,}: they take the processor, or Python's interpreter lock",
            f"py-spy dump --pid {known.pid}" if known and known.pid else "",
        )
    if held:
        hosts = window.hosts(tuple(held))
        return Lead(
            tuple(evidence),
            f"{capital(ranks_text(sorted(held)))} had no processor: see what else runs on "
            f"{', '.join(hosts) or 'their hosts'} since step {change.step:,}",
            "ps -eo pid,psr,ni,pcpu,comm --sort=-pcpu | head -20",
        )
    return Lead()


def _busier(window: Window, step: int, more_ms: float) -> dict[int, tuple[float, float]]:
    """Return ranks whose other threads take so much more a step: ms of CPU before and after.

    The rank with the largest rise first. What is not known is left out.
    """
    table = window.steps
    usual = np.flatnonzero(~table.special() & table.seen())
    turn = int(np.searchsorted(table.steps[usual], step))
    most = window.policy.slowdown_near_steps
    sides = usual[max(0, turn - most) : turn], usual[turn:][-most:]
    if not all(map(len, sides)):
        return {}
    before, after = (
        median(table.get("process_cpu")[:, side] - table.get("cpu")[:, side], 1) for side in sides
    )
    rows = {rank: (max(float(before[row]), 0.0), float(after[row]))
            for rank, row in table.row_of.items()}  # fmt: skip
    found = {rank: pair for rank, pair in rows.items() if pair[1] - pair[0] >= more_ms}
    return dict(sorted(found.items(), key=lambda one: one[1][0] - one[1][1]))


def _held(window: Window, change: StepSlowdown, more_ms: float) -> dict[int, tuple[float, float]]:
    """Return ranks that wait so much more for a processor: share of the time before and after."""
    steps = window.steps.steps
    first_ms, last_ms = window.time_ms(int(steps[0])), window.time_ms(int(steps[-1]))
    turn_ms = window.time_ms(change.step)
    if first_ms is None or turn_ms is None or last_ms is None:
        return {}
    found = {}
    for rank in window.steps.row_of:
        before = window.samples.run_delay_ratio(rank, first_ms * 1e6, turn_ms * 1e6)
        after = window.samples.run_delay_ratio(rank, turn_ms * 1e6, last_ms * 1e6)
        if before is None or after is None:
            continue
        if after * change.after_ms - before * change.before_ms >= more_ms:
            found[rank] = (before, after)
    return found


def regression_finding(window: Window, slower: Slower) -> Finding:
    """Return the finding on a run that is slower than earlier ones."""
    policy, rise = window.policy, slower.rise
    cost = 1.0 - 1.0 / (1.0 + rise)
    total = slower.now.step_ms - slower.base_ms
    phase, more = max(slower.phases.items(), key=lambda item: item[1], default=("", 0.0))
    holds = more >= policy.min_explained_share * total
    many = f"the last {slower.num_runs} runs" if slower.num_runs > 1 else "the run before"
    where = (
        f"; {_WORDS.get(phase, phase)} holds {percent_text(min(1.0, more / total))} of it"
        if holds else "; no single phase holds most of it"
    )  # fmt: skip
    changes = [f"{fact.removeprefix('env.')} {cut(old, 40)} -> {cut(new, 40)}"
               for fact, old, new in slower.changed[:4]]  # fmt: skip
    what_changed = f"; changed since: {', '.join(changes)}" if changes else ""
    first = slower.changed[0][0].removeprefix("env.") if slower.changed else ""
    return window.finding(
        "regression",
        "runs",
        levels=[Level("step", many, slower.base_ms)],
        cost=cost,
        what=f"This run is {percent_text(rise)} slower than {many} with the same command",
        why=f"Median step {ms_text(slower.now.step_ms)} against {ms_text(slower.base_ms)}"
        f"{where}{what_changed}",
        next=f"Run once with the old {first} to confirm"
        if first
        else "Compare both runs phase by phase; look at what else runs on these machines",
        confidence=(
            0.85 if slower.num_runs >= policy.regression_min_runs else 0.65,
            f"against {slower.num_runs} earlier run{'s' * (slower.num_runs > 1)}, of which "
            f"{percent_text(slower.limit)} is the least that counts",
        ),
        evidence=tuple(
            f"{_WORDS.get(name, name)}: {value:+.1f} ms a step"
            for name, value in sorted(slower.phases.items(), key=lambda item: -item[1])[:4]
        ),
        ruled_out=(f"Chance among steps: Mann-Whitney p {_p_text(slower.p)}",),
        disproof="The run reads other data or a configuration file that has changed",
    )


def _p_text(p: float) -> str:
    return "< 1e-9" if p < 1e-9 else f"= {p:.1e}"


def _why_unsure(change: StepSlowdown, policy: Policy) -> str:
    if change.strength < policy.slowdown_clear_sigmas:
        return "it is little above the scatter of the time"
    if change.seconds < policy.slowdown_seconds:
        return f"it has lasted {seconds_text(change.seconds)} only"
    return "it is clear and costs little: the step time alone, without a rank or phase to blame"


def slowdown_finding(window: Window, change: StepSlowdown) -> Finding:
    """Return the finding on a run that became slower than it was."""
    policy = window.policy
    cost = 1.0 - 1.0 / (1.0 + change.rise)
    severity = severity_of_cost(cost, policy)
    if change.strength < policy.slowdown_clear_sigmas or change.seconds < policy.slowdown_seconds:
        severity = "info"
    alone = len(window.steps.row_of) < 2
    absent = "; per-rank data absent" if alone else ""
    how = "gradually, not at one step" if change.is_gradual else f"at step {change.step:,}"
    lead = Lead() if change.is_gradual else lead_of(window, change)
    return window.finding(
        "slowdown",
        _WITHIN,
        levels=[Level("step", "before", change.before_ms), Level("step", "since", change.after_ms)],
        severity=severity,
        onset_step=change.step,
        cost=cost,
        what=f"The whole job became {percent_text(change.rise)} slower {how}",
        why=f"Medians of {policy.slowdown_block} steps went from {ms_text(change.before_ms)} to "
        f"{ms_text(change.after_ms)}, {change.strength:.0f} times their scatter{absent}",
        next="Look at what all ranks share: storage, network, room temperature; and at what grows "
        "with the steps: logs, caches, validation"
        if change.is_gradual
        else lead.next
        or f"Look at what all ranks share and changed at step {change.step:,}: "
        "storage, network, other jobs",
        command=lead.command,
        confidence=(
            0.8 if severity != "info" else 0.5,
            "the step time alone, without a rank or phase to blame"
            if severity != "info"
            else _why_unsure(change, policy),
        ),
        evidence=(f"Step {change.step:,}: from here on", *lead.evidence),
        disproof="Batches became larger or sequences longer there",
    )
