"""A finding does not flap: what was said with evidence is taken back with as much.

Detectors look each second and know little of what they said before, so an estimate near a level
turns over and over while load comes and stops. A finding becomes worse at once; it becomes milder,
recovers or disappears when that has been so for as long as an accusation had to last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rankscope_server.findings.finding import SEVERITIES, Finding
from rankscope_server.findings.policy import Policy

# Those that estimate. Others know: a hang whose rank arrived is over at once.
ESTIMATES = frozenset({"straggler", "stalls", "slow-link", "data-loading"})


class Steadiness:
    """Since when each finding of an attempt would be milder than it is said to be."""

    def __init__(self) -> None:
        self._since_ns: dict[str, int] = {}

    def settle(
        self,
        detector: str,
        before: Mapping[str, Finding],
        findings: Iterable[Finding],
        now_ns: int,
        policy: Policy,
    ) -> tuple[Finding, ...]:
        """Return what a detector says now: what it finds, and what is too early to take back.

        `before` are the findings of the last look by key, of any detector; times are of the server.
        """
        now = {finding.key: finding for finding in findings}
        if detector not in ESTIMATES:
            return tuple(now.values())
        for key, old in before.items():
            if old.detector != detector or not _counts(old):
                continue
            new = now.get(key)
            if _is_as_bad(old, new) or _is_in_another(old, now.values()):
                self._since_ns.pop(key, None)
                continue
            if new is not None and _is_at_the_level(old, new, policy):
                now[key] = replace(new, severity=old.severity)
                continue
            since_ns = self._since_ns.setdefault(key, now_ns)
            if now_ns - since_ns < policy.persistent_seconds * 1e9:
                now[key] = old if new is None else _as_before(old, new)
            else:
                del self._since_ns[key]
        return tuple(now.values())


def _counts(finding: Finding) -> bool:
    return finding.state == "open" and finding.severity != "info"


def _rank(finding: Finding) -> int:
    return SEVERITIES.index(finding.severity)


def _is_as_bad(old: Finding, new: Finding | None) -> bool:
    return new is not None and new.state == "open" and _rank(new) <= _rank(old)


def _is_in_another(old: Finding, findings: Iterable[Finding]) -> bool:
    """Return whether the same ranks are named by another finding that is as bad."""
    return any(
        finding.key != old.key and set(old.ranks) <= set(finding.ranks) and _is_as_bad(old, finding)
        for finding in findings
        if old.ranks
    )


def _is_at_the_level(old: Finding, new: Finding, policy: Policy) -> bool:
    """Return whether a finding is milder only because its cost is a little below the level."""
    is_critical = old.severity == "critical"
    level = policy.cost_critical_ratio if is_critical else policy.cost_info_ratio
    cost = new.cost_throughput_ratio or 0.0
    is_next = new.severity == "warning" if is_critical else cost < level
    return new.state == "open" and is_next and cost >= policy.cost_keep_share * level


def _as_before(old: Finding, new: Finding) -> Finding:
    """Return what is found now as bad as it was, still open: all of it old if it has ended."""
    return replace(new, severity=old.severity) if new.state == "open" else old
