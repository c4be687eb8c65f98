"""What is said of the end of a run: who failed, who echoes it, and what shows it."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.wire.formulas import rank_hours_per_day
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import Evidence, Finding, Severity
from rankscope_server.findings.text import capital, confidence_word, cut, ranks_text
from rankscope_server.observe.failures import Failure

_TRACE_LINES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What the failures of an attempt amount to."""

    failures: tuple[Failure, ...]  # of the culprits, first in time first; may be empty
    echoes: tuple[int, ...]
    torn_down: tuple[int, ...]
    severity: Severity
    confidence: float
    reason: str
    what: str
    why: str
    next: str
    began: Failure | None = None  # the first that is known, where no culprit is


def finding_of(window: Window, cause: Cause) -> Finding:
    """Return the finding of a cause."""
    ranks = tuple(failure.rank for failure in cause.failures)
    first = cause.failures[0] if cause.failures else None
    began = first or cause.began
    is_info = cause.severity == "info"
    cost = None if is_info else 1.0
    return Finding(
        # One end, one finding: what is learned later corrects it and leaves no other accused.
        key=f"{window.attempt}/root-cause/end",
        detector="root-cause",
        kind="stopped" if is_info else "crash",
        severity=cause.severity,
        attempt=window.attempt,
        ranks=ranks,
        hosts=window.hosts(ranks),
        onset_step=_onset(window, began),
        onset_ms=began.time_ns / 1e6 if began else None,
        cost_throughput_ratio=cost,
        cost_rank_hours_per_day=None
        if cost is None
        else rank_hours_per_day(window.world_size, cost),
        confidence=cause.confidence,
        confidence_text=f"{confidence_word(cause.confidence)}: {cause.reason}",
        what=cause.what,
        why=cause.why,
        next=cause.next,
        next_command="dmesg -T | grep -i -E 'killed process|oom'" if _is_kill(first) else "",
        evidence=_evidence(window, cause),
        ruled_out=_ruled_out(cause),
        would_be_wrong_if="An earlier failure was not recorded, as on a host without the agent",
        policy_hash=window.policy.hash,
        victims=tuple(sorted({*cause.echoes, *cause.torn_down} - set(ranks))),
    )


def is_before_training(window: Window, failure: Failure) -> bool:
    """Return whether a rank failed before it had done a step, as far as it says."""
    says = failure.step == 1 or (failure.error is not None and failure.step == 0)
    return says and failure.rank >= 0 and not window.last_step(failure.rank)


def _onset(window: Window, began: Failure | None) -> int | None:
    """Return the step in which it began; what failed before training began in none."""
    if began is None or is_before_training(window, began):
        return None
    return began.step or None


def _is_kill(failure: Failure | None) -> bool:
    return failure is not None and "SIGKILL" in failure.text


def _evidence(window: Window, cause: Cause) -> tuple[Evidence, ...]:
    facts = []
    if cause.failures and (entry := cause.failures[0].entry) is not None:
        facts.append(Evidence(f"The error book knows it as {entry.family}: {entry.cause}"))
    for failure in cause.failures[:4]:
        link = window.link(failure.rank, failure.step or None)
        facts.append(Evidence(f"Rank {failure.rank}: {failure.text}", link))
        if failure.line:
            logs = f"runs/{window.run_id}/logs?rank={failure.rank}"
            facts.append(Evidence(f"Its log: {failure.line}", logs))
        if failure.error is not None and failure.error.traceback:
            lines = failure.error.traceback.strip().splitlines()[-_TRACE_LINES:]
            facts.append(Evidence("\n".join(lines), f"runs/{window.run_id}/errors"))
    if cause.echoes:
        facts.append(
            Evidence(f"Echoes on {ranks_text(cause.echoes)}", f"runs/{window.run_id}/errors")
        )
    return tuple(facts)


def _ruled_out(cause: Cause) -> tuple[str, ...]:
    out = []
    if cause.failures and cause.echoes:
        out.append(f"{capital(ranks_text(cause.echoes))}: failed later, by a lost connection")
    if cause.failures and cause.torn_down:
        out.append("A stop from outside: not all ranks were signalled before the first failure")
    return tuple(out)


def crash_next(window: Window, first: Failure) -> str:
    """Return what to do about a rank that failed first."""
    host = window.host(first.rank) or "its host"
    if first.entry is not None and first.entry.role == "initiating":
        return first.entry.remedy
    if first.error is not None:
        return f"Read the traceback of rank {first.rank}, fix what it names, then restart"
    if "SIGKILL" in first.text:
        return (
            f"Look on {host} for the out-of-memory killer (dmesg, memory.events of the cgroup) "
            f"and for who else may have killed rank {first.rank}"
        )
    if first.text.startswith("killed"):
        return f"Read the last lines and the core of rank {first.rank} on {host}"
    if first.line:
        return f"Do what the line says that rank {first.rank} ended with, then restart"
    return f"Read the last log lines of rank {first.rank}, then restart"


def printed_text(first: Failure) -> str:
    """Return the line by which a rank said why it left with an exit code, behind a colon."""
    is_told = first.ended is None or not first.is_weak or "without" in first.text
    return "" if is_told or not first.line else f": {cut(first.line, 160).rstrip('.')}"
