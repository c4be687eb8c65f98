"""What is said of the end of a run: who failed, who echoes it, and what shows it."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import Evidence, Finding, Severity
from rankscope_server.findings.text import capital, cut, ranks_text
from rankscope_server.observe.failures import Failure

_TRACE_LINES = 8
# With which evidence begins that says why a process ended.
KNOWN_ERROR, ITS_LOG = "Known error", "Its log"


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashCause:
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
    kind: str = "crash"
    ranks: tuple[int, ...] | None = None  # that are named, if not those of `failures`


def finding_of(window: Window, cause: CrashCause) -> Finding:
    """Return the finding of a cause."""
    failed = tuple(failure.rank for failure in cause.failures)
    ranks = failed if cause.ranks is None else cause.ranks
    first = cause.failures[0] if cause.failures else None
    began = first or cause.began
    is_info = cause.severity == "info"
    cost = 1.0 if cause.severity != "info" and cause.kind == "crash" else None
    return window.finding(
        "stopped" if is_info else cause.kind,
        "end",  # one key for any cause: what is learned later corrects it
        severity=cause.severity,
        ranks=ranks,
        onset_step=_onset(window, began),
        onset_ms=began.time_ns / 1e6 if began else None,
        cost=cost,
        confidence=(cause.confidence, cause.reason),
        what=cause.what,
        why=cause.why,
        next=cause.next,
        command="dmesg -T | grep -i -E 'killed process|oom'" if _is_kill(first) else "",
        evidence=_evidence(window, cause),
        ruled_out=_ruled_out(cause),
        disproof="An earlier failure was not recorded, as on a host without the agent",
        victims=tuple(sorted({*cause.echoes, *cause.torn_down} - set(failed))),
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


def _evidence(window: Window, cause: CrashCause) -> tuple[Evidence, ...]:
    facts = []
    if cause.failures and (entry := cause.failures[0].entry) is not None:
        facts.append(Evidence(f"{KNOWN_ERROR} ({entry.family}): {entry.cause}"))
    for failure in cause.failures[:4]:
        link = window.link(failure.rank, failure.step or None)
        facts.append(Evidence(f"Rank {failure.rank}: {failure.text}", link))
        if failure.line:
            logs = f"runs/{window.run_id}/logs?rank={failure.rank}"
            facts.append(Evidence(f"{ITS_LOG}: {failure.line}", logs))
        if failure.error is not None and failure.error.traceback:
            lines = failure.error.traceback.strip().splitlines()[-_TRACE_LINES:]
            facts.append(Evidence("\n".join(lines), f"runs/{window.run_id}/errors"))
    if cause.echoes:
        facts.append(
            Evidence(f"Echoes on {ranks_text(cause.echoes)}", f"runs/{window.run_id}/errors")
        )
    return tuple(facts)


def _ruled_out(cause: CrashCause) -> tuple[str, ...]:
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
    is_clear = first.ended is None or not first.is_weak or "without" in first.text
    return "" if is_clear or not first.line else f": {cut(first.line, 160).rstrip('.')}"
