"""Where the time of a run went, and whether it saves at the right distance."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from rankscope_server.diagnose.goodput.checkpointing import Mtbf, daly, mtbf_of, waste
from rankscope_server.diagnose.goodput.ledger import Attempt, Ledger, ledger
from rankscope_server.diagnose.goodput.words import (
    goodput_finding,
    interval_finding,
    lone_evaluation_finding,
    slow_save_finding,
)
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import NOT_HERE, DetectorResult, Finding, ran, skipped
from rankscope_server.observe.resume import Start, last_whole_save

_DAY_SECONDS = 86_400.0
_LONG_STEP = 0.95  # of a rank's steps are shorter


@dataclass(frozen=True, slots=True)
class Saves:
    """The checkpoints of an attempt, one entry per step that saved."""

    steps: tuple[int, ...]
    seconds: tuple[float, ...]  # of the slowest rank
    slowest: tuple[int, ...]  # that rank, -1 where all take alike
    every_seconds: float  # median distance
    is_async: bool


@dataclass(frozen=True, slots=True)
class Advice:
    """What another interval would save. Shares of all time, seconds."""

    interval: float
    now: float
    waste_now: float
    waste_then: float
    delta: float
    restart: float
    mtbf: Mtbf


@dataclass(frozen=True, slots=True)
class LoneEvaluation:
    """Time that some ranks evaluate while others wait for them; seconds of one rank."""

    ranks: tuple[int, ...]  # those that evaluate
    others: tuple[int, ...]  # those that do not
    seconds: float  # by which the first evaluate longer
    of_seconds: float  # that the run's steps have taken

    @property
    def share(self) -> float:
        """Its share of the time of the run."""
        return self.seconds / self.of_seconds


class Goodput:
    """Sums up where the time of a run went, and finds checkpoints that are slow or badly spaced."""

    name: ClassVar[str] = "goodput"
    kinds: ClassVar[tuple[str, ...]] = (
        "goodput", "slow_checkpoint", "checkpoint_interval", "lone_evaluation",
    )  # fmt: skip
    needs: ClassVar[frozenset[str]] = frozenset({"rank", "steps"})

    def look(self, window: Window) -> DetectorResult:
        """Return the ledger of the run up to now, and advice on checkpoints."""
        if not window.is_newest:
            return ran(self, note="counted with the newest attempt")
        if window.facts.is_recording:
            return skipped(self, "a recording is a part of a run", NOT_HERE)
        findings = _of_saves(window)
        if (alone := lone_evaluation_of(window)) is not None:
            findings.append(lone_evaluation_finding(window, alone))
        book = ledger_of(window)
        lasted = 0.0 if book is None else book.wall_seconds / max(book.num_ranks, 1)
        if book is None or lasted < window.policy.ledger_min_seconds:
            need = window.policy.ledger_min_seconds
            if findings:
                return ran(self, findings, note=f"the ledger needs {need:.0f} s of a run")
            return skipped(self, f"needs {need:.0f} s of a run", "wait")
        if lasted >= window.policy.ledger_told_seconds or book.num_attempts > 1:
            findings.insert(0, goodput_finding(window, book))
        text = f"{100 * book.share('productive'):.0f} % of the ranks' time computes what is kept"
        return ran(self, findings, note=text)


def _of_saves(window: Window) -> list[Finding]:
    """Return what is wrong with how the run saves, or how often."""
    saves = saves_of(window)
    if saves is None:
        return []
    slow, advice = slow_save_finding(window, saves), advice_of(window, saves)
    findings = [] if slow is None else [slow]
    if advice is not None:
        findings.append(interval_finding(window, advice, saves))
    return findings


def lone_evaluation_of(window: Window) -> LoneEvaluation | None:
    """Return who evaluates while the others wait; None where all do, or it takes little time."""
    sums = window.facts.sums.by_rank
    if len(sums) < 2 or len(sums) < window.world_size:
        return None
    longest = max(one.evaluating_ns for one in sums.values())
    ranks = tuple(sorted(rank for rank in sums if sums[rank].evaluating_ns > longest / 2))
    others = tuple(sorted(set(sums) - set(ranks)))
    if not others:
        return None
    extra = longest - max(sums[rank].evaluating_ns for rank in others)
    waited = min(sums[rank].parts["blocked"] for rank in others)
    lasted = max(one.last_end_ns for one in sums.values()) - min(
        one.first_start_ns for one in sums.values()
    )
    found = LoneEvaluation(ranks, others, min(extra, waited) / 1e9, lasted / 1e9)
    return found if lasted > 0 and found.share >= window.policy.cost_silent_ratio else None


def ledger_of(window: Window) -> Ledger | None:
    """Return the ledger of all attempts up to this one."""
    # Clocks of hosts, not the server's: what is not over has lasted until its newest step.
    sums = window.facts.sums.by_rank.values()
    newest = max((one.last_end_ns for one in sums), default=0)
    states = max((state.time_ns for state in window.states.values()), default=0)
    return ledger([_attempt(one) for one in (*window.past, window)], max(newest, states))


def _attempt(window: Window) -> Attempt:
    ended = {rank: end.time_ns for rank, end in window.ended.items()}
    clean = bool(ended) and all(end.reason == "clean" for end in window.ended.values())
    facts, sums = window.facts, window.facts.sums.by_rank
    # A rank tells of itself again when it knows more; its first step begins with its first word.
    came_up = {
        rank: min(known.time_ns, sums[rank].first_start_ns) if rank in sums else known.time_ns
        for rank, known in window.ranks.items()
    }
    start = None
    if sums:
        start = Start(
            first_step=min(one.first_step for one in sums.values()),
            last_step=max(one.last_step for one in sums.values()),
            ahead=facts.script_steps.ahead,
            saved_step=last_whole_save((save.rank, save.step) for save in facts.saves.values()),
        )
    return Attempt(window.attempt, came_up, ended, clean, sums, window.steps, start,
                   facts.launched_ns, facts.left_ns)  # fmt: skip


def saves_of(window: Window) -> Saves | None:
    """Return the checkpoints of this attempt; None for fewer than two."""
    by_step: dict[int, list[tuple[float, int, int]]] = defaultdict(list)
    for save in window.facts.saves.values():
        if np.isfinite(save.seconds) and save.rank >= 0:
            by_step[save.step].append((save.seconds, save.rank, save.time_ns))
    if len(by_step) < 2:
        return None
    steps = sorted(by_step)
    seconds, slowest, times = [], [], []
    for step in steps:
        totals: dict[int, float] = defaultdict(float)  # a rank may write several files
        for took, rank, _ in by_step[step]:
            totals[rank] += took
        for rank in totals:
            totals[rank] += _beside_ms(window, rank, step) / 1e3
        ordered = sorted(totals.items(), key=lambda item: (-item[1], item[0]))
        apart = len(ordered) > 2 and ordered[0][1] > window.policy.slow_save_ratio * float(
            np.median([value for _, value in ordered[1:]])
        )
        seconds.append(ordered[0][1])
        slowest.append(ordered[0][0] if apart else -1)
        times.append(max(time_ns for _, _, time_ns in by_step[step]))
    every = float(np.median(np.diff(times))) / 1e9
    how = {save.how for save in window.facts.saves.values()}
    return Saves(tuple(steps), tuple(seconds), tuple(slowest), every, how == {"dcp.async_save"})


def _beside_ms(window: Window, rank: int, step: int) -> float:
    """Return what a rank worked in a step that saves beyond a long usual step.

    Scripts also copy, sync and rename, beside the call that is timed.
    """
    table = window.steps
    row = table.row_of.get(rank)
    at = int(np.searchsorted(table.steps, step))
    if row is None or at >= table.num_steps or table.steps[at] != step:
        return 0.0
    own = table.get("own")[row]
    usual = own[~table.special()]
    usual = usual[~np.isnan(usual)]
    if not len(usual) or np.isnan(own[at]):
        return 0.0
    middle, high = np.quantile(usual, [0.5, _LONG_STEP])
    excess = float(own[at] - middle)
    return excess if excess > 2 * (high - middle) and excess > middle else 0.0


def failures_of(window: Window) -> tuple[int, float]:
    """Return how many attempts before this one failed, and host-days of the whole run."""
    failed, host_days = 0, 0.0
    for one in (*window.past, window):
        hosts = len({known.host for known in one.ranks.values()})
        sums = one.facts.sums.by_rank.values()
        began = min((known.time_ns for known in one.ranks.values()), default=0)
        ended = max((end.time_ns for end in one.ended.values()), default=0)
        ended = max([ended, *(part.last_end_ns for part in sums)])
        host_days += hosts * max(0, ended - began) / 1e9 / _DAY_SECONDS
        if one is not window and any(end.reason != "clean" for end in one.ended.values()):
            failed += 1
    return failed, host_days


def restart_seconds(window: Window) -> float:
    """Return the mean time from the last step of an attempt to the first of the next one."""
    gaps = []
    windows = [one for one in (*window.past, window) if one.facts.sums.by_rank]
    for one, following in pairwise(windows):
        last = max(part.last_end_ns for part in one.facts.sums.by_rank.values())
        # A first step holds building the model and reading the checkpoint.
        first = min(part.first_start_ns + int(part.beyond_usual("productive", first=True))
                    for part in following.facts.sums.by_rank.values())  # fmt: skip
        gaps.append(max(0, first - last) / 1e9)
    return float(np.mean(gaps)) if gaps else window.policy.restart_seconds


def advice_of(window: Window, saves: Saves) -> Advice | None:
    """Return a better distance of checkpoints, None where the present one is about as good."""
    policy = window.policy
    delta = float(np.median(saves.seconds))
    if saves.is_async or delta <= 0 or saves.every_seconds <= 0:
        return None
    failures, host_days = failures_of(window)
    hosts = max(1, len({known.host for known in window.ranks.values()}))
    mtbf = mtbf_of(failures, host_days, hosts, policy.own_failures)
    seconds, restart = mtbf.days * _DAY_SECONDS, restart_seconds(window)
    best = daly(delta, seconds)
    now = waste(saves.every_seconds, delta, seconds, restart)
    then = waste(best, delta, seconds, restart)
    if now - then < policy.cost_silent_ratio:
        return None
    return Advice(best, saves.every_seconds, now, then, delta, restart, mtbf)
