"""Transfers that became slower at some step, where too few groups show in which part.

What is left of a step beyond the self time of its slowest rank is waiting for transfers. If that
part grows and self time does not, the network is slow, or what feeds it; one group of all ranks
does not show where, the connections between them may.
"""

from __future__ import annotations

import numpy as np

from rankscope_server.diagnose.shared.connections import reaches_back, slower_link, with_location
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import Evidence, Finding
from rankscope_server.findings.statistics import median, scatter
from rankscope_server.findings.text import ms_text, percent_text, ratio_text
from rankscope_server.observe.deviation import usual_steps
from rankscope_server.observe.episodes import turning_point

_NOT_KNOWN = "; which link is not known"


def placed_transfers(window: Window) -> list[Finding]:
    """Return the finding on slower transfers if the connections show which link it is."""
    finding = slower_transfers(window)
    return [finding] if finding is not None and _is_placed(finding) else []


def slower_transfers(window: Window) -> Finding | None:
    """Return the finding on transfers that take longer than they did; None where they do not."""
    table, policy = window.steps, window.policy
    columns = np.flatnonzero(usual_steps(table, policy))[-policy.stall_steps :]
    if len(columns) < policy.healthy_min_steps + policy.clear_steps:
        return None
    own, duration = table.get("own")[:, columns], table.get("duration")[:, columns]
    step_ms = median(duration, 0)
    waits = np.maximum(step_ms - np.fmax.reduce(own), 0.0)
    calm, now = float(median(waits[: policy.baseline_steps])), float(
        median(waits[-policy.long_window :])
    )  # fmt: skip
    if not now >= policy.slower_transfers_ratio * max(calm, 1e-3):
        return None
    first = turning_point(waits, calm, now)
    before, after = waits[:first], waits[first:]
    if len(before) < policy.healthy_min_steps or len(after) < policy.long_window:
        return None
    middle, sigma = float(median(before)), float(scatter(before[None])[0])
    gain = float(median(after)) - middle
    cost = gain / float(median(step_ms[first:]))
    lasted = float(np.nansum(step_ms[first:])) / 1e3
    is_steady = np.mean(after > middle + gain / 2) >= policy.slower_transfers_share
    if (
        gain <= policy.slower_transfers_sigmas * sigma
        or cost < policy.cost_critical_ratio
        or not is_steady
    ):
        return None
    if lasted < policy.clear_seconds:
        return None
    onset = int(table.steps[columns[first]])
    finding = _finding(window, onset, middle, middle + gain, cost)
    location = slower_link(window, finding.onset_ms, cost)
    if location is None:
        old = window.before.get(finding.key)
        if old is not None and _is_placed(old) and not reaches_back(window, finding.onset_ms):
            return old
        # a pipeline also waits for its other stages
        is_pipeline = any(known.num_stages > 1 for known in window.ranks.values())
        return None if is_pipeline else finding
    what = finding.what.removesuffix(_NOT_KNOWN)
    return with_location(
        window, finding, location, what, "critical" if location.ranks else "warning"
    )


def _is_placed(finding: Finding) -> bool:
    return not finding.what.endswith(_NOT_KNOWN)


def _finding(window: Window, onset: int, before_ms: float, after_ms: float, cost: float) -> Finding:
    ranks = tuple(sorted(window.steps.ranks))
    confidence = 0.6
    return window.finding(
        "slow_link",
        "slower",
        severity="warning",
        onset_step=onset,
        cost=cost,
        what=f"Transfers are {ratio_text(after_ms / max(before_ms, 1e-3))} slower since step "
        f"{onset:,}{_NOT_KNOWN}",
        why=f"Beyond the self time of the slowest rank a step holds {ms_text(after_ms)}, "
        f"{ms_text(before_ms)} before: {percent_text(cost)} of the throughput. All ranks are in "
        "the same groups, so that all wait alike",
        next="Measure pairs of ranks: `rankscope doctor` on each host, then a pairwise bandwidth "
        "check; halve the ranks until the slow half is one link",
        command="mpirun -H HOST_A,HOST_B -N 1 sendrecv_perf -b 64M -e 64M  # nccl-tests",
        confidence=(confidence, "the change is measured, its place is not"),
        evidence=(Evidence(f"Step {onset:,}, the first slow one", window.link(ranks[0], onset)),),
        ruled_out=(
            "A slow rank: the self time of the slowest rank is taken off each step",
            "Waiting for data: that is self time of the rank that waits",
        ),
        disproof="The script began to send more at this step, for example without "
        "no_sync or with more parameters",
        victims=ranks,
    )
