"""What becomes of an alert: it opens, changes, recovers or closes; one message for each. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from rankscope_server.alerts.evaluate import Clear, Firing, Outcome
from rankscope_server.findings.finding import SEVERITIES, Severity

Event: TypeAlias = Literal["opened", "changed", "recovered", "closed", "test"]
CLEAR_NS = 60 * 10**9  # it must be clear for so long: what comes and goes is one alert
CHANGE_PAUSE_NS = 600 * 10**9  # between two messages that do not say that it is worse


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAlert:
    """An alert that is open, as it was last stored. `is_muted`: a person has closed it."""

    id: int
    severity: Severity
    facts: tuple[str, ...]
    notified_ns: int
    is_muted: bool = False
    clear_since_ns: int = 0  # 0: it fires


@dataclass(frozen=True, slots=True)
class Change:
    """What is to be stored and, unless it is silent, to be sent."""

    event: Event
    firing: Firing | None = None
    reason: str = ""
    is_silent: bool = False


def advance(known: OpenAlert | None, outcome: Outcome | None, now_ns: int) -> Change | None:
    """Return what happens to a subject's alert, None for nothing. No outcome: not known."""
    if isinstance(outcome, Firing):
        return Change("opened", outcome) if known is None else _still(known, outcome, now_ns)
    if known is None or outcome is None:
        return None
    has_lasted = known.clear_since_ns and now_ns - known.clear_since_ns >= CLEAR_NS
    if not (outcome.is_final or has_lasted):
        return None
    event: Event = "recovered" if outcome.is_recovery else "closed"
    return Change(event, reason=outcome.why, is_silent=known.is_muted)


def clear_since(known: OpenAlert, outcome: Outcome | None, now_ns: int) -> int:
    """Return since when a subject is clear, 0 where it fires; not known changes nothing."""
    if isinstance(outcome, Firing):
        return 0
    return known.clear_since_ns or now_ns if isinstance(outcome, Clear) else known.clear_since_ns


def _still(known: OpenAlert, firing: Firing, now_ns: int) -> Change | None:
    is_worse = SEVERITIES.index(firing.severity) < SEVERITIES.index(known.severity)
    is_other = firing.facts != known.facts or firing.severity != known.severity
    is_due = now_ns - known.notified_ns >= CHANGE_PAUSE_NS
    if known.is_muted or not (is_worse or (is_other and is_due)):
        return None
    return Change("changed", firing)
