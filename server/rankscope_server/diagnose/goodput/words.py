"""What the goodput detector says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.wire.formulas import rank_hours_per_day
from rankscope_server.diagnose.goodput.ledger import PARTS, Ledger
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import Evidence, Finding, Severity
from rankscope_server.findings.text import (
    capital,
    hours_text,
    percent_text,
    place_text,
    ranks_text,
    seconds_text,
    span_text,
)

if TYPE_CHECKING:
    from rankscope_server.diagnose.goodput.detector import Advice, LoneEvaluation, Saves


def goodput_finding(window: Window, book: Ledger) -> Finding:
    """Return the ledger as a finding; it accuses nobody."""
    order = sorted(PARTS[1:], key=lambda part: -book.share(part))
    rest = [f"{percent_text(book.share(part))} {part}" for part in order
            if book.share(part) >= 0.005]  # fmt: skip
    restarts = book.num_attempts - 1
    why = ", ".join(rest) or "nothing else takes half a percent"
    if restarts:
        why += f"; {restarts} restart{'s' * (restarts > 1)}, {book.lost_steps:,} steps done again"
    hours = book.wall_seconds / 3600
    return Finding(
        key=f"{window.attempt}/goodput/ledger",
        detector="goodput",
        kind="goodput",
        severity="info",
        attempt=window.attempt,
        what=f"{percent_text(book.share('productive'))} of the ranks' time went into computing "
        "that is kept",
        why=why,
        next="Begin with the largest other part; its own finding says how"
        if rest else "Nothing to do",
        confidence=0.9,
        confidence_text="high: the parts are measured and add up to the wall time",
        evidence=(
            Evidence(f"{hours_text(hours)} from the first sign of the run"),
            Evidence(f"Effective training time ratio (time in steps that are kept): "
                     f"{percent_text(book.ettr)}"),
        ),
        would_be_wrong_if="Ranks ran before the agent was attached, or waited in a queue",
        policy_hash=window.policy.hash,
    )  # fmt: skip


def slow_save_finding(window: Window, saves: Saves) -> Finding | None:
    """Return the finding on checkpoints that take much of the time, None where they do not."""
    policy = window.policy
    recent = saves.seconds[-policy.recent_saves :]
    delta = float(np.median(recent))
    share = min(1.0, delta / max(saves.every_seconds, delta, 1e-9))
    if share < policy.cost_silent_ratio:
        return None
    before = saves.seconds[: -policy.recent_saves]
    jumped = len(before) >= 2 and delta > policy.slow_save_ratio * float(np.median(before))
    # Those that take the time: the last save of a run may hold nothing new.
    slow = [n for n, took in enumerate(saves.seconds) if took >= delta / 2]
    names = {saves.slowest[n] for n in slow[-policy.recent_saves :]}
    rank = names.pop() if len(names) == 1 else -1
    ranks = (rank,) if rank >= 0 else ()
    severity: Severity = "info" if share < policy.save_warning_share else "warning"
    at = saves.steps[-len(recent)] if jumped else saves.steps[slow[0]]
    who = f"{capital(place_text(ranks, window.hosts(ranks)))} saves" if ranks else "Saving"
    usual = (
        f"; before step {at:,} it took {seconds_text(float(np.median(before)))}" if jumped else ""
    )
    alone = "; the other ranks save in a fraction of it" if ranks else ""
    return Finding(
        key=f"{window.attempt}/goodput/slow-checkpoint/{rank if ranks else 'all'}",
        detector="goodput",
        kind="slow_checkpoint",
        severity=severity,
        attempt=window.attempt,
        ranks=ranks,
        hosts=window.hosts(ranks),
        onset_step=at,
        onset_ms=window.time_ms(at),
        cost_throughput_ratio=share,
        cost_rank_hours_per_day=rank_hours_per_day(window.world_size, share),
        what=f"{who} checkpoints slowly: {percent_text(share)} of the time goes there"
        if ranks else f"Saving checkpoints takes {percent_text(share)} of the time",
        why=f"A save holds the job for {seconds_text(delta)}, one every "
        f"{span_text(saves.every_seconds)}{usual}{alone}",
        next="Save in the background (torch.distributed.checkpoint.async_save), to a local disk "
        "first, or less often",
        next_command="iostat -x 1",
        confidence=0.9,
        confidence_text="high: each save is timed",
        evidence=tuple(
            Evidence(f"Step {step:,}: {seconds_text(took)}")
            for step, took in list(zip(saves.steps, saves.seconds, strict=True))[-4:]
        ),
        would_be_wrong_if="The time is spent on something else inside the call",
        policy_hash=policy.hash,
    )  # fmt: skip


def lone_evaluation_finding(window: Window, alone: LoneEvaluation) -> Finding:
    """Return the finding on ranks that evaluate while the others wait."""
    policy, ranks, share = window.policy, alone.ranks, alone.share
    who = capital(place_text(ranks, window.hosts(ranks)))
    others = ranks_text(alone.others)
    wait = "wait" if len(alone.others) > 1 else "waits"
    evaluate = "evaluate" if len(ranks) > 1 else "evaluates"
    return Finding(
        key=f"{window.attempt}/goodput/lone-evaluation",
        detector="goodput",
        kind="lone_evaluation",
        severity="info" if share < policy.save_warning_share else "warning",
        attempt=window.attempt,
        ranks=ranks,
        hosts=window.hosts(ranks),
        cost_throughput_ratio=share,
        cost_rank_hours_per_day=rank_hours_per_day(window.world_size, share),
        what=f"{who} {evaluate} while {others} {wait}: {percent_text(share)} of the time",
        why=f"{capital(ranks_text(ranks))} spent {span_text(alone.seconds)} of "
        f"{span_text(alone.of_seconds)} in evaluation that {others} had no part in; {others} "
        "waited at least as long in collectives",
        next="Let each rank evaluate a part of the data and reduce the results; evaluate less "
        "often, or in a job of its own",
        confidence=0.8,
        confidence_text="medium: evaluation and waiting are measured, not which wait is for it",
        evidence=tuple(
            Evidence(f"Rank {rank}: {seconds_text(one.evaluating_ns / 1e9)} in evaluation, "
                     f"{seconds_text(one.parts['blocked'] / 1e9)} waiting")
            for rank, one in sorted(window.facts.sums.by_rank.items())[:4]
        ),
        would_be_wrong_if="The others would have waited anyway, for a slow rank or the network",
        policy_hash=policy.hash,
        victims=alone.others,
    )  # fmt: skip


def interval_finding(window: Window, advice: Advice, saves: Saves) -> Finding:
    """Return the advice to save at another distance."""
    saved = advice.waste_now - advice.waste_then
    own = advice.mtbf.failures >= window.policy.own_failures
    severity: Severity = (
        "warning" if own and saved >= window.policy.cost_info_ratio else "info"
    )  # what rests on a prior alone is a hint
    mtbf = advice.mtbf
    low, high = span_text(mtbf.low * 86_400), span_text(mtbf.high * 86_400)
    return Finding(
        key=f"{window.attempt}/goodput/checkpoint-interval",
        detector="goodput",
        kind="checkpoint_interval",
        severity=severity,
        attempt=window.attempt,
        cost_throughput_ratio=saved,
        cost_rank_hours_per_day=rank_hours_per_day(window.world_size, saved),
        what=f"Saving every {span_text(advice.interval)} in place of {span_text(advice.now)} "
        f"would lose {percent_text(advice.waste_then)} in place of "
        f"{percent_text(advice.waste_now)} of the time",
        why=f"A save takes {seconds_text(advice.delta)}, a restart {span_text(advice.restart)}; "
        f"the job fails about every {span_text(mtbf.days * 86_400)} ({low} to {high}; from "
        f"{mtbf.source})",
        next=f"Save every {span_text(advice.interval)}; half or twice that costs little more",
        confidence=0.8 if own else 0.5,
        confidence_text="medium: the failures are this run's own" if own
        else "low: how often it fails is taken from another cluster",
        evidence=(Evidence(f"{len(saves.steps)} saves in this attempt"),),
        would_be_wrong_if="Failures come in bursts: then the best distance is shorter, and what "
        "it saves is less",
        policy_hash=window.policy.hash,
    )  # fmt: skip
