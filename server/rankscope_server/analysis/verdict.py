"""One verdict per run: the culprit first, what it explains folded under it.

Order of explanation: a wrong call explains the hang or the errors that follow it at once; a crash
explains the hang and the echoes after it; a hang explains that the ranks behind it are slow or
lose each other. What began before and goes on stays on its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rankscope_server.analysis.answers import Answer, Coverage, Folded, Verdict
from rankscope_server.analysis.attempt import AttemptState
from rankscope_server.detectors.finding import SEVERITIES, DetectorResult, Finding
from rankscope_server.detectors.policy import POLICY, Policy
from rankscope_server.detectors.words import percent_text

# The answer "healthy" rests on these, whose inputs every run has. What others could not look at
# is said beside it.
_CORE = frozenset({"straggler", "hang", "root-cause"})
_MIN_SURE = 0.5  # a crash below it has seen echoes only
_SOON_STEPS = 64  # four samples of gradient norms: what an odd batch does shows within them
_SLACK_MS = 1_000.0  # a hang that began so little after the crash's end is its consequence


def fold(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings of one attempt with `explained_by` set where another explains one."""
    crash = next((f for f in findings if f.kind == "crash" and f.severity == "critical"), None)
    desyncs = [f for f in findings if f.kind == "desync" and f.severity == "critical"]
    hangs = [f for f in findings if f.kind == "hang" and f.state == "open"]
    folded = []
    for finding in findings:
        cause = None
        if finding.kind == "hang" and crash is not None and _crash_explains(crash, finding):
            cause = crash
        elif finding.kind == "crash" and finding.confidence < _MIN_SURE and hangs:
            cause = hangs[0]
        elif finding.detector == "straggler":
            cause = _stop_explains(crash or next(iter(hangs), None), finding)
            cause = cause or _throttle_explains(findings, finding)
        elif finding.kind in ("loss_spike", "divergence", "corrupt_batch", "corruption"):
            cause = _number_explains(findings, finding)
        elif finding.kind in ("regression", "slowdown"):
            cause = _cost_explains(findings, finding)
        elif finding.detector == "pipeline":  # a stage is slow because a rank of it is
            cause = next((f for f in findings if _is_slow_rank_of(f, finding)), None)
        elif finding.kind == "slow_link":  # a slow rank is slow at sending, too
            cause = next((f for f in findings if _is_slow_rank_of(f, finding)), None)
        if finding.kind in ("hang", "crash"):
            wrong = next((f for f in desyncs if _desync_explains(f, finding)), None)
            cause = wrong or cause
        folded.append(dataclasses.replace(finding, explained_by=cause.key if cause else None))
    return folded


def _crash_explains(crash: Finding, hang: Finding) -> bool:
    """Return whether a hang is what a crash left behind, not what led to it."""
    if set(hang.ranks) & set(crash.ranks):
        return True
    return (
        crash.onset_ms is not None
        and hang.onset_ms is not None
        and hang.onset_ms >= crash.onset_ms - _SLACK_MS
    )


def _desync_explains(desync: Finding, stop: Finding) -> bool:
    """Return whether a stop followed a wrong call closely; what came long after is its own."""
    if desync.onset_ms is None or stop.onset_ms is None:
        return desync.onset_ms is not None and stop.group == desync.group
    after_ms = stop.onset_ms - desync.onset_ms
    return -_SLACK_MS <= after_ms <= POLICY.desync_echo_seconds * 1e3


def _stop_explains(stop: Finding | None, slow: Finding) -> Finding | None:
    """Return the stop if the slow spell is only its last steps."""
    if stop is None or stop.onset_step is None or slow.onset_step is None:
        return None
    return stop if slow.onset_step >= stop.onset_step - 1 else None


def _is_slow_rank_of(slow: Finding, stage: Finding) -> bool:
    is_open = slow.detector == "straggler" and slow.state == "open"
    return is_open and bool(set(slow.ranks) & set(stage.ranks))


def _number_explains(findings: Sequence[Finding], later: Finding) -> Finding | None:
    """Return the NaN, or the odd batch of one rank, from which a number of training went wrong."""
    if later.onset_step is None:
        return None
    causes = ("nan",) if later.kind in ("corrupt_batch", "corruption") else ("nan", "corrupt_batch")
    return next(
        (
            finding
            for finding in findings
            if finding.kind in causes
            and finding.severity != "info"
            and finding.onset_step is not None
            and finding.onset_step - 1 <= later.onset_step
            and (finding.kind == "nan" or later.onset_step <= finding.onset_step + _SOON_STEPS)
        ),
        None,
    )


def _cost_explains(findings: Sequence[Finding], slower: Finding) -> Finding | None:
    """Return the finding whose cost is most of what makes the whole run slower."""
    causes = [
        finding
        for finding in findings
        if finding.state == "open"
        and finding.detector != slower.detector
        and finding.severity != "info"
        and (finding.cost_throughput_ratio or 0.0) >= 0.5 * (slower.cost_throughput_ratio or 1.0)
    ]
    return max(causes, key=lambda finding: finding.cost_throughput_ratio or 0.0, default=None)


def _throttle_explains(findings: Sequence[Finding], slow: Finding) -> Finding | None:
    """Return the throttled GPU, if it is a warning itself, that makes a rank slow."""
    return next(
        (
            finding
            for finding in findings
            if finding.kind == "throttle"
            and finding.severity != "info"
            and set(slow.ranks) <= set(finding.ranks)
            and slow.kind == "slow_compute"
        ),
        None,
    )


def verdict_of(findings: Sequence[Finding], results: Sequence[DetectorResult]) -> Verdict | None:
    """Return the verdict on an attempt: its worst open finding that nothing else explains."""
    open_ones = [
        f for f in findings if f.state == "open" and f.explained_by is None and f.severity != "info"
    ]
    if not open_ones:
        return None
    chosen = min(open_ones, key=_order)
    under = tuple(Folded(f.key, f.what) for f in findings if f.explained_by == chosen.key)
    checks = tuple(
        text
        for result in results
        if result.status.state == "ran" and result.status.name != chosen.detector
        for text in result.checked
    )
    values = {field.name: getattr(chosen, field.name) for field in dataclasses.fields(Finding)}
    values["ruled_out"] = (*chosen.ruled_out, *checks)
    return Verdict(**values, folded=under)


def _order(finding: Finding) -> tuple[int, int, float, str]:
    kinds = {"crash": 0, "hang": 1, "desync": 1}
    return (
        SEVERITIES.index(finding.severity),
        kinds.get(finding.kind, 2),
        -(finding.cost_throughput_ratio or 0.0),
        finding.key,
    )


def answer_of(
    attempt: AttemptState | None,
    verdict: Verdict | None,
    findings: Sequence[Finding],
    coverage: Coverage,
    policy: Policy,
) -> Answer:
    """Return the first sentence of the page. Missing data is never called health."""
    if verdict is not None:
        return Answer("culprit", verdict.what, verdict.why)
    if attempt is None or not attempt.known_ranks:
        return Answer("waiting", "No verdict yet: nothing was heard of a rank")
    notes = [f.what for f in findings if f.state == "open"]
    detail = "; ".join(notes)
    if coverage.reporting < coverage.expected:
        return Answer("unknown", f"No verdict: partial, {coverage.text}", detail)
    steps = attempt.steps.num_steps + attempt.steps.dropped_steps
    world = attempt.world_size
    # Advice that cannot be given leaves the answer whether somebody is slow or stuck.
    statuses = [result.status for result in attempt.results]
    skipped = [status for status in statuses if status.state == "skipped"]
    if world == 1 and steps:
        return Answer(
            "unknown",
            f"No verdict: one rank, {steps:,} steps, nobody to compare it with",
            detail,
        )
    if steps < policy.min_steps:
        return Answer(
            "waiting", f"No verdict yet: needs {policy.min_steps} steps, has {steps}", detail
        )
    if any(status.name in _CORE for status in skipped):
        reasons = "; ".join(f"{s.name}: {s.reason}" for s in skipped if s.name in _CORE)
        return Answer("unknown", f"No verdict: {reasons}", detail)
    ran = len(attempt.results) - len(skipped)
    if skipped:
        names = ", ".join(status.name for status in skipped)
        notes.append(f"not looked at, for lack of input: {names}")
        detail = "; ".join(notes)
    lost = f"; {sum(row.count for row in coverage.losses):,} records lost" * bool(coverage.losses)
    over = [f for f in findings if f.state == "recovered" and f.severity != "info"]
    if over:
        detail = "; ".join([*notes, *(f"over: {f.what}" for f in over[:3])])
    return Answer(
        "healthy",
        f"Healthy: {world} ranks, {steps:,} steps, {ran} detectors found nothing above "
        f"{percent_text(policy.cost_info_ratio)} of throughput{' now' if over else ''}{lost}",
        detail,
    )
