"""How bad a cost is: one rule for all detectors."""

from __future__ import annotations

from rankscope_server.findings.finding import Severity
from rankscope_server.findings.policy import Policy


def severity_of_cost(cost: float, policy: Policy) -> Severity:
    """Return the severity of a cost, a share (0-1) of the job's throughput."""
    if cost >= policy.cost_critical_ratio:
        return "critical"
    return "warning" if cost >= policy.cost_info_ratio else "info"
