"""What is said about ranks that stall now and then."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope_server.diagnose.shared.processor_limit import CPU_LIMIT, limit_next
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import Evidence, Finding, Severity
from rankscope_server.findings.text import (
    ms_text,
    percent_text,
    times_text,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalling:
    """A rank that stalls, or all of them where `rank` is None."""

    rank: int | None
    onset_step: int
    last_step: int
    is_over: bool
    num_stalls: int  # steps, between both
    num_steps: int
    most_of_others: int  # separate stalls of the worst other rank
    usual_ms: float  # self time of a step that does not stall
    extra_ms: float  # and what a stall adds
    pause_ms: float  # of Python's collector in a stall; 0: that is not what it is
    phase: str  # that holds most of it
    limit: str = ""  # what a limit on processor time does, where that is most of it
    cost: float
    severity: Severity


def kind_of(case: Stalling) -> str:
    """Return the kind of finding that a case is."""
    return "garbage_collection" if case.pause_ms else CPU_LIMIT if case.limit else "slow_compute"


def name_of(case: Stalling) -> str:
    """Return by what its finding is known again."""
    return f"{kind_of(case)}/{'all' if case.rank is None else case.rank}"


def finding_of(window: Window, case: Stalling) -> Finding:
    """Return the finding of a case."""
    kind = kind_of(case)
    ranks = () if case.rank is None else (case.rank,)
    is_measured = case.pause_ms or case.limit
    confidence = 0.9 if is_measured else 0.75
    rule = (
        "the agent measured the pauses" if case.pause_ms
        else "the kernel counted for how long" if case.limit else "step times alone"
    )  # fmt: skip
    return window.finding(
        kind,
        name_of(case),
        detector="stalls",
        severity=case.severity,
        is_over=case.is_over,
        ranks=ranks,
        onset_step=case.onset_step,
        ended_step=case.last_step if case.is_over else None,
        cost=case.cost,
        confidence=(confidence, rule),
        what=_what(window, case),
        why=_why(window, case),
        next=limit_next(window, case.rank) if case.limit and case.rank is not None else _next(case),
        evidence=_evidence(window, case),
        ruled_out=_ruled_out(case),
        disproof=_disproof(case),
        victims=window.others(ranks) if ranks else (),
    )


def _often(case: Stalling) -> str:
    return f"one step in {max(1, round(case.num_steps / case.num_stalls))}"


def _what(window: Window, case: Stalling) -> str:
    if case.rank is None:
        return (
            f"Python's collector pauses each rank for {ms_text(case.pause_ms)} in {_often(case)}, "
            "each in other steps, and all wait for each"
        )
    who = window.who((case.rank,))
    verb = "stalled" if case.is_over else "stalls"
    since = f"since step {case.onset_step:,}"
    if case.is_over:
        since = f"from step {case.onset_step:,} to step {case.last_step:,}"
    if case.pause_ms:
        return (
            f"{who} {'was' if case.is_over else 'is'} paused by Python's collector for "
            f"{ms_text(case.pause_ms)} in {_often(case)} {since}"
        )
    return f"{who} {verb} for {ms_text(case.extra_ms)} in {_often(case)} {since}"


def _why(window: Window, case: Stalling) -> str:
    verb = "lost" if case.is_over or window.has_ended else "lose"
    hours = window.loss_text(case.cost, case.onset_step, case.last_step if case.is_over else None)
    lost = (
        f"{window.world_size:,} ranks {verb} {percent_text(case.cost)} of their throughput, "
        f"{hours} (by the work of the slowest rank of each step)"
    )
    if case.rank is None:
        return f"The pauses would cost less if all ranks took them in the same step: {lost}"
    cause = (
        "the pause, which the agent measured, is most of the excess"
        if case.pause_ms
        else case.limit or f"most of it is in {case.phase}"
    )
    return (
        f"Its other steps take {ms_text(case.usual_ms)} of self time, a stall "
        f"{ms_text(case.usual_ms + case.extra_ms)}; {cause}. {case.num_stalls} such steps of "
        f"{case.num_steps}, {case.most_of_others} on the worst other rank: {lost}"
    )


def _next(case: Stalling) -> str:
    if case.pause_ms:
        find = "" if case.rank is None else f"; find what rank {case.rank} allocates"
        return (
            "Collect on all ranks in the same step: gc.disable(), and gc.collect() every some "
            f"hundred steps; or gc.freeze() after the set-up{find}"
        )
    return (
        f"Profile rank {case.rank} until it stalls, and read what runs then: periodic work of the "
        "script, another process, a clock that drops"
    )


def _evidence(window: Window, case: Stalling) -> tuple[Evidence, ...]:
    link = window.link(case.rank or 0, case.last_step)
    return (
        Evidence(f"the last of the stalls, step {case.last_step:,}", link),
        Evidence(
            f"self time {times_text((case.usual_ms + case.extra_ms) / case.usual_ms)} that of the "
            "rank's other steps"
            if case.usual_ms > 0
            else "self time of the other steps is not known"
        ),
    )


def _ruled_out(case: Stalling) -> tuple[str, ...]:
    if case.rank is None:
        return ()
    ruled = ["a rank that is slow in every step: the steps between are usual ones"]
    ruled.append("waiting for data or for other ranks: neither is counted")
    if case.most_of_others * 3 <= case.num_stalls:
        ruled.append("something that stalls all ranks: the others do so far less often")
    return tuple(ruled)


def _disproof(case: Stalling) -> str:
    if case.rank is None:
        return "the steps are as long with the collector switched off (gc.disable())"
    if case.pause_ms:
        return f"rank {case.rank} stalls as often with gc.disable()"
    return f"rank {case.rank} was given more to do in these steps, for example longer sequences"
