"""What the regression detector says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.wire.formulas import rank_hours_per_day
from rankscope_server.diagnose.regression.slowdown_signals import Lead, lead_of
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import Evidence, Finding
from rankscope_server.findings.severity import severity_of
from rankscope_server.findings.text import cut, ms_text, percent_text

if TYPE_CHECKING:
    from rankscope_server.diagnose.regression.detector import Slowdown, Slower

_WORDS = {"blocked": "waiting for other ranks and communication", "other": "time outside phases"}


def regression_finding(window: Window, slower: Slower) -> Finding:
    """Return the finding on a run that is slower than earlier ones."""
    policy, rise = window.policy, slower.rise
    cost = 1.0 - 1.0 / (1.0 + rise)
    total = slower.now.step_ms - slower.base_ms
    phase, more = max(slower.phases.items(), key=lambda item: item[1], default=("", 0.0))
    holds = more >= policy.min_explained_share * total
    many = f"the last {slower.num_runs} runs" if slower.num_runs > 1 else "the run before"
    where = (
        f"; {_WORDS.get(phase, phase)} holds {percent_text(min(1.0, more / total))} of it"
        if holds else "; no single phase holds most of it"
    )  # fmt: skip
    changes = [f"{fact.removeprefix('env.')} {cut(old, 40)} -> {cut(new, 40)}"
               for fact, old, new in slower.changed[:4]]  # fmt: skip
    what_changed = f"; changed since: {', '.join(changes)}" if changes else ""
    first = slower.changed[0][0].removeprefix("env.") if slower.changed else ""
    return Finding(
        key=f"{window.attempt}/regression/runs",
        detector="regression",
        kind="regression",
        severity=severity_of(cost, policy),
        attempt=window.attempt,
        cost_throughput_ratio=cost,
        cost_rank_hours_per_day=rank_hours_per_day(window.world_size, cost),
        what=f"This run is {percent_text(rise)} slower than {many} with the same command",
        why=f"Median step {ms_text(slower.now.step_ms)} against {ms_text(slower.base_ms)}"
        f"{where}{what_changed}",
        next=f"Run once with the old {first} to confirm" if first
        else "Compare both runs phase by phase; look at what else runs on these machines",
        confidence=0.85 if slower.num_runs >= policy.regression_min_runs else 0.65,
        confidence_text=f"{'high' if slower.num_runs >= policy.regression_min_runs else 'medium'}: "
        f"against {slower.num_runs} earlier run{'s' * (slower.num_runs > 1)}, of which "
        f"{percent_text(slower.limit)} is the least that counts",
        evidence=tuple(
            Evidence(f"{_WORDS.get(name, name)}: {value:+.1f} ms a step")
            for name, value in sorted(slower.phases.items(), key=lambda item: -item[1])[:4]
        ),
        ruled_out=(f"Chance among steps: Mann-Whitney p {_p_text(slower.p)}",),
        would_be_wrong_if="The run reads other data or a configuration file that has changed",
        policy_hash=policy.hash,
    )  # fmt: skip


def _p_text(p: float) -> str:
    return "< 1e-9" if p < 1e-9 else f"= {p:.1e}"


def slowdown_finding(window: Window, change: Slowdown) -> Finding:
    """Return the finding on a run that became slower than it was."""
    policy = window.policy
    cost = 1.0 - 1.0 / (1.0 + change.rise)
    severity = severity_of(cost, policy)
    if change.strength < policy.slowdown_clear_sigmas or change.seconds < policy.slowdown_seconds:
        severity = "info"
    alone = len(window.steps.row_of) < 2
    absent = "; per-rank data absent" if alone else ""
    how = "gradually, not at one step" if change.is_gradual else f"at step {change.step:,}"
    lead = Lead() if change.is_gradual else lead_of(window, change)
    return Finding(
        key=f"{window.attempt}/regression/within",
        detector="regression",
        kind="slowdown",
        severity=severity,
        attempt=window.attempt,
        onset_step=change.step,
        onset_ms=window.time_ms(change.step),
        cost_throughput_ratio=cost,
        cost_rank_hours_per_day=rank_hours_per_day(window.world_size, cost),
        what=f"The whole job became {percent_text(change.rise)} slower {how}",
        why=f"Medians of {policy.slowdown_block} steps went from {ms_text(change.before_ms)} to "
        f"{ms_text(change.after_ms)}, {change.strength:.0f} times their scatter{absent}",
        next="Look at what all ranks share: storage, network, room temperature; and at what grows "
        "with the steps: logs, caches, validation" if change.is_gradual
        else lead.next or f"Look at what all ranks share and changed at step {change.step:,}: "
        "storage, network, other jobs",
        next_command=lead.command,
        confidence=0.8 if severity != "info" else 0.5,
        confidence_text="medium: the step time alone, without a rank or phase to blame"
        if severity != "info" else "low: it stands little above how the time scatters",
        evidence=(Evidence(f"Step {change.step:,}: from here on"), *lead.evidence),
        would_be_wrong_if="Batches became larger or sequences longer there",
        policy_hash=policy.hash,
    )  # fmt: skip
