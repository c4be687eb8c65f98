"""Where the time of a run went, and whether it saves at the right distance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, TypeAlias

import numpy as np

from rankscope.wire.schema import STEP_CHECKPOINT, STEP_EVALUATION
from rankscope_server.diagnose.goodput.checkpointing import Mtbf, daly, mtbf_of, waste
from rankscope_server.diagnose.goodput.crash_loop import loop_finding, loop_of
from rankscope_server.diagnose.goodput.ledger import (
    PARTS,
    Ledger,
    LedgerAttempt,
    ledger_of_attempts,
)
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import (
    NOT_HERE,
    DetectorResult,
    Finding,
    Level,
    Severity,
    ran,
    skipped,
)
from rankscope_server.findings.policy import Policy
from rankscope_server.findings.text import (
    capital,
    hours_text,
    percent_text,
    ranks_text,
    seconds_text,
    span_text,
)
from rankscope_server.observe.episodes import turning_point
from rankscope_server.observe.resume import Start, last_whole_save

_DAY_SECONDS = 86_400.0
_LONG_STEP = 0.95  # of a rank's steps are shorter
_MOST_SAVES = 0.75  # took no longer than what is said of those before
_ByStep: TypeAlias = dict[int, list[tuple[float, int, int]]]  # seconds, rank, when
_LEAST_SECONDS = 1e-3  # that a save takes, where it has a logarithm


@dataclass(frozen=True, slots=True)
class Saves:
    """The checkpoints of an attempt, one entry per step that saved."""

    steps: tuple[int, ...]
    seconds: tuple[float, ...]  # of the slowest rank
    slowest: tuple[int, ...]  # that rank, -1 where all take alike
    every_seconds: float  # median distance
    is_async: bool


@dataclass(frozen=True, slots=True)
class IntervalAdvice:
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
    finds: ClassVar[str] = (
        "Where the time of a run went; attempts that fail alike; checkpoints that are slow or "
        "badly spaced; ranks that evaluate while others wait"
    )
    needs: ClassVar[str] = (
        "steps; checkpoints of torch, DCP or safetensors, or those that the script marks by "
        "`rankscope.phase`; of a restarted run also the script's step numbers "
        "(`log_metrics`), else it went on behind the newest whole checkpoint"
    )
    silent: ClassVar[str] = "a run of less than ten minutes that was never restarted"

    def look(self, window: Window) -> DetectorResult:
        """Return the ledger of the run up to now, and advice on checkpoints."""
        if not window.is_newest:
            return ran(self, note="counted with the newest attempt")
        if window.facts.is_recording:
            return skipped(self, "a recording is a part of a run", NOT_HERE)
        findings = _of_saves(window)
        if (alone := lone_evaluation_of(window)) is not None:
            findings.append(lone_evaluation_finding(window, alone))
        ledger = ledger_of(window)
        if (loop := loop_of(window)) is not None:
            findings.append(loop_finding(window, loop, ledger))
        lasted = 0.0 if ledger is None else ledger.wall_seconds / max(ledger.num_ranks, 1)
        if ledger is None or lasted < window.policy.ledger_min_seconds:
            need = window.policy.ledger_min_seconds
            if findings:
                return ran(self, findings, note=f"the ledger needs {need:.0f} s of a run")
            return skipped(self, f"needs {need:.0f} s of a run", "wait")
        if lasted >= window.policy.ledger_reported_seconds or ledger.num_attempts > 1:
            findings.insert(0, goodput_finding(window, ledger))
        text = f"{100 * ledger.share('productive'):.0f} % of the ranks' time computes what is kept"
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
    longest = max(rank_time.evaluating_ns for rank_time in sums.values())
    ranks = tuple(sorted(rank for rank in sums if sums[rank].evaluating_ns > longest / 2))
    others = tuple(sorted(set(sums) - set(ranks)))
    if not others:
        return None
    extra = longest - max(sums[rank].evaluating_ns for rank in others)
    waited = min(sums[rank].parts["blocked"] for rank in others)
    lasted = max(rank_time.last_end_ns for rank_time in sums.values()) - min(
        rank_time.first_start_ns for rank_time in sums.values()
    )
    found = LoneEvaluation(ranks, others, min(extra, waited) / 1e9, lasted / 1e9)
    return found if lasted > 0 and found.share >= window.policy.cost_silent_ratio else None


def ledger_of(window: Window) -> Ledger | None:
    """Return the ledger of all attempts up to this one."""
    # Clocks of hosts, not the server's: what is not over has lasted until its newest step.
    sums = window.facts.sums.by_rank.values()
    newest = max((rank_time.last_end_ns for rank_time in sums), default=0)
    states = max((state.time_ns for state in window.states.values()), default=0)
    return ledger_of_attempts(
        [_attempt(one) for one in (*window.past, window)], max(newest, states)
    )


def _attempt(window: Window) -> LedgerAttempt:
    ended = {rank: end.time_ns for rank, end in window.ended.items()}
    clean = bool(ended) and all(end.reason == "clean" for end in window.ended.values())
    facts, sums = window.facts, window.facts.sums.by_rank
    # A rank registers again when it knows more; its first step begins with its first word.
    came_up = {
        rank: min(known.time_ns, sums[rank].first_start_ns) if rank in sums else known.time_ns
        for rank, known in window.ranks.items()
    }
    start = None
    if sums:
        start = Start(
            first_step=min(rank_time.first_step for rank_time in sums.values()),
            last_step=max(rank_time.last_step for rank_time in sums.values()),
            ahead=facts.script_steps.ahead,
            saved_step=last_whole_save((save.rank, save.step) for save in facts.saves.values()),
        )
    return LedgerAttempt(window.attempt, came_up, ended, clean, sums, window.steps, start,
                   facts.launched_ns, facts.left_ns, _is_stuck(window))  # fmt: skip


def _is_stuck(window: Window) -> bool:
    return any(f.kind == "hang" and f.state == "open" for f in window.before.values())


def saves_of(window: Window) -> Saves | None:
    """Return the checkpoints of this attempt; None for fewer than two."""
    said = _said_saves(window)
    marked = _marked_saves(window, said)
    by_step = said | marked
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
    is_async = how == {"dcp.async_save"} and not marked
    return Saves(tuple(steps), tuple(seconds), tuple(slowest), every, is_async)


def _said_saves(window: Window) -> _ByStep:
    """Return what the hooks of libraries timed, by step."""
    by_step: _ByStep = defaultdict(list)
    for save in window.facts.saves.values():
        if np.isfinite(save.seconds) and save.rank >= 0:
            by_step[save.step].append((save.seconds, save.rank, save.time_ns))
    return dict(by_step)


def _marked_saves(window: Window, said: Collection[int]) -> _ByStep:
    """Return what only the script calls a checkpoint, by the phase of that name.

    No hook sees how it saves, or it says nothing inside a phase that the script names. Of a run of
    less than a minute that is no way of saving yet.
    """
    table = window.steps
    if not table.num_steps:
        return {}
    started_ms = table.get("started_ms")
    lasted_ms = float(np.nanmax(started_ms) - np.nanmin(started_ms))
    if not lasted_ms >= 1e3 * window.policy.ledger_min_seconds:
        return {}
    flags = table.flags()
    is_saving = (flags & STEP_CHECKPOINT != 0) & (flags & STEP_EVALUATION == 0)
    is_saving[:, np.isin(table.steps, list(said))] = False
    by_step: _ByStep = defaultdict(list)
    for row, column in np.argwhere(is_saving).tolist():
        duration, own, blocked = (
            float(table.get(name)[row, column]) for name in ("duration", "own", "blocked")
        )
        held_ms = duration - own - blocked
        if held_ms > 0:
            when_ns = int((float(started_ms[row, column]) + duration) * 1e6)
            by_step[int(table.steps[column])].append((held_ms / 1e3, table.ranks[row], when_ns))
    return dict(by_step)


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


def advice_of(window: Window, saves: Saves) -> IntervalAdvice | None:
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
    return IntervalAdvice(best, saves.every_seconds, now, then, delta, restart, mtbf)


def goodput_finding(window: Window, ledger: Ledger) -> Finding:
    """Return the ledger as a finding; it accuses no rank."""
    order = sorted(PARTS[1:], key=lambda part: -ledger.share(part))
    rest = [f"{percent_text(ledger.share(part))} {part}" for part in order
            if ledger.share(part) >= 0.005]  # fmt: skip
    restarts = ledger.num_attempts - 1
    again = (ledger.share("restart") + ledger.share("lost work")) * bool(restarts)
    is_costly = again > window.policy.cost_info_ratio
    why = ", ".join(rest) or "nothing else takes half a percent"
    if restarts:
        why += f"; {restarts} restart{'s' * (restarts > 1)}, {ledger.lost_steps:,} steps done again"
    hours = ledger.wall_seconds / 3600
    return window.finding(
        "goodput",
        "ledger",
        cost=again if is_costly else None,
        what=f"{percent_text(ledger.share('productive'))} of the ranks' time went into computing "
        f"that is kept{f', {percent_text(again)} into restarts and steps done again' * is_costly}",
        why=why,
        next="Begin with the largest other part; its own finding says how"
        if rest
        else "Nothing to do",
        confidence=(0.9, "the parts are measured and add up to the wall time"),
        evidence=(
            f"{hours_text(hours)} from the first sign of the run",
            f"Effective training time ratio (time in steps that are kept): "
            f"{percent_text(ledger.ettr)}",
        ),
        disproof="Ranks ran before the agent was attached, or waited in a queue",
    )


def _slower_from(saves: Saves, policy: Policy) -> int:
    """Return from which save on they are far slower than the first; 0: they are not."""
    seconds, count = np.maximum(saves.seconds, _LEAST_SECONDS), policy.recent_saves
    calm, lately = (float(np.median(part)) for part in (seconds[:count], seconds[-count:]))
    if len(seconds) < count + 2 or lately <= policy.slow_save_ratio * calm:
        return 0
    return turning_point(np.log(seconds), float(np.log(calm)), float(np.log(lately)))


def slow_save_finding(window: Window, saves: Saves) -> Finding | None:
    """Return the finding on checkpoints that take much of the time, None where they do not."""
    policy = window.policy
    recent = saves.seconds[-policy.recent_saves :]
    delta = float(np.median(recent))
    share = min(1.0, delta / max(saves.every_seconds, delta, 1e-9))
    if share < policy.cost_silent_ratio:
        return None
    before = saves.seconds[: _slower_from(saves, policy)]
    usual_seconds = float(np.quantile(before, _MOST_SAVES)) if before else 0.0
    # Those that take the time: the last save of a run may hold nothing new.
    slow = [n for n, took in enumerate(saves.seconds) if took >= delta / 2]
    names = {saves.slowest[n] for n in slow[-policy.recent_saves :]}
    rank = names.pop() if len(names) == 1 else -1
    ranks = (rank,) if rank >= 0 else ()
    severity: Severity = "info" if share < policy.save_warning_share else "warning"
    at = saves.steps[len(before) or slow[0]]
    who = f"{window.who(ranks)} saves" if ranks else "Saving"
    usual = f"; before step {at:,} it took {seconds_text(usual_seconds)}" if before else ""
    alone = "; the other ranks save in a fraction of it" if ranks else ""
    return window.finding(
        "slow_checkpoint",
        f"slow-checkpoint/{rank if ranks else 'all'}",
        levels=[Level("saves", "before", usual_seconds)] if before else (),
        severity=severity,
        ranks=ranks,
        onset_step=at,
        cost=share,
        what=f"{who} checkpoints slowly: {percent_text(share)} of the time"
        if ranks
        else f"Saving checkpoints takes {percent_text(share)} of the time",
        why=f"A save holds the job for {seconds_text(delta)}, one every "
        f"{span_text(saves.every_seconds)}{usual}{alone}",
        next="Save in the background (torch.distributed.checkpoint.async_save), to a local disk "
        "first, or less often",
        command="iostat -x 1",
        confidence=(0.9, "each save is timed"),
        evidence=tuple(
            f"Step {step:,}: {seconds_text(took)}"
            for step, took in list(zip(saves.steps, saves.seconds, strict=True))[-4:]
        ),
        disproof="The time is spent on something else inside the call",
    )


def lone_evaluation_finding(window: Window, alone: LoneEvaluation) -> Finding:
    """Return the finding on ranks that evaluate while the others wait."""
    policy, ranks, share = window.policy, alone.ranks, alone.share
    who = window.who(ranks)
    others = ranks_text(alone.others)
    wait = "wait" if len(alone.others) > 1 else "waits"
    evaluate = "evaluate" if len(ranks) > 1 else "evaluates"
    return window.finding(
        "lone_evaluation",
        "lone-evaluation",
        severity="info" if share < policy.save_warning_share else "warning",
        ranks=ranks,
        cost=share,
        what=f"{who} {evaluate} while {others} {wait}: {percent_text(share)} of the time",
        why=f"{capital(ranks_text(ranks))} spent {span_text(alone.seconds)} of "
        f"{span_text(alone.of_seconds)} in evaluation that {others} had no part in; {others} "
        "waited at least as long in collectives",
        next="Let each rank evaluate a part of the data and reduce the results; evaluate less "
        "often, or in a job of its own",
        confidence=(0.8, "evaluation and waiting are measured, not which wait is for it"),
        evidence=tuple(
            f"Rank {rank}: {seconds_text(rank_time.evaluating_ns / 1e9)} in evaluation, "
            f"{seconds_text(rank_time.parts['blocked'] / 1e9)} waiting"
            for rank, rank_time in sorted(window.facts.sums.by_rank.items())[:4]
        ),
        disproof="The others would have waited anyway, for a slow rank or the network",
        victims=alone.others,
    )


def interval_finding(window: Window, advice: IntervalAdvice, saves: Saves) -> Finding:
    """Return the advice to save at another distance."""
    saved = advice.waste_now - advice.waste_then
    own = advice.mtbf.failures >= window.policy.own_failures
    severity: Severity = (
        "warning" if own and saved >= window.policy.cost_info_ratio else "info"
    )  # what rests on a prior alone is a hint
    mtbf = advice.mtbf
    low, high = span_text(mtbf.low * 86_400), span_text(mtbf.high * 86_400)
    return window.finding(
        "checkpoint_interval",
        "checkpoint-interval",
        levels=[Level("apart", "advised", advice.interval), Level("apart", "now", advice.now)],
        severity=severity,
        cost=saved,
        what=f"Saving every {span_text(advice.interval)} in place of {span_text(advice.now)} "
        f"would lose {percent_text(advice.waste_then)} in place of "
        f"{percent_text(advice.waste_now)} of the time",
        why=f"A save takes {seconds_text(advice.delta)}, a restart {span_text(advice.restart)}; "
        f"the job fails about every {span_text(mtbf.days * 86_400)} ({low} to {high}; from "
        f"{mtbf.source})",
        next=f"Save every {span_text(advice.interval)}; half or twice that costs little more",
        confidence=(
            0.8 if own else 0.5,
            "the failures are this run's own"
            if own
            else "how often it fails is taken from another cluster",
        ),
        evidence=(f"{len(saves.steps)} saves in this attempt",),
        disproof="Failures come in bursts: then the best distance is shorter, and what "
        "it saves is less",
    )
