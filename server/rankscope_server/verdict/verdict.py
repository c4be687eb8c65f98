"""One verdict per run: the culprit first, what it explains grouped under it (see `grouping`).

Where nothing is known for sure, the answer says which measurement would decide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set

from rankscope_server.diagnose.attempt import AttemptState
from rankscope_server.findings.finding import (
    NOT_HERE,
    SEVERITIES,
    DetectorResult,
    Finding,
    Severity,
)
from rankscope_server.findings.kinds import MORE_WORK, kind_named
from rankscope_server.findings.policy import POLICY, Policy
from rankscope_server.findings.text import percent_text, ranks_text
from rankscope_server.verdict.answers import Answer, Coverage, GroupedFinding, Verdict
from rankscope_server.verdict.coverage import Left, left_text, thinned_share

_ITS_OUTPUT = "its last lines of output, under Logs"
# The answer "healthy" rests on these, whose inputs every run has. What others could not look at
# is said beside it.
_CORE = frozenset({"straggler", "hang", "root-cause"})
# What these say as info is short or unclear; what others say so is measured, and small.
_SUSPECT = frozenset({"straggler", "stalls", "balance", "slow-link", "regression"})


def verdict_of(findings: Sequence[Finding], results: Sequence[DetectorResult]) -> Verdict | None:
    """Return the verdict on an attempt: its worst open finding that nothing else explains."""
    roots = [f for f in findings if f.state == "open" and f.explained_by is None]
    incidents = [(f, [g for g in findings if g.explained_by == f.key]) for f in roots]
    faults = [(f, under) for f, under in incidents if _worst(f, under) != "info"]
    if not faults:
        return None
    chosen, under = min(faults, key=lambda incident: _order(*incident))
    checks = tuple(
        text
        for result in results
        if result.status.state == "ran" and result.status.name != chosen.detector
        for text in result.checked
    )
    values = {field.name: getattr(chosen, field.name) for field in dataclasses.fields(Finding)}
    values["ruled_out"] = (*chosen.ruled_out, *checks)
    values["severity"] = _worst(chosen, under)
    return Verdict(
        **values,
        folded=tuple(GroupedFinding(finding.key, finding.what) for finding in under),
        deciding=_deciding_kind(chosen, results),
    )


def _worst(finding: Finding, under: Sequence[Finding]) -> Severity:
    """Return the severity of an incident: what a cause did counts as much as the cause."""
    if finding.severity == "info":
        return "info"  # advice is no culprit, whatever it explains
    return min((other.severity for other in (finding, *under)), key=SEVERITIES.index)


def _order(finding: Finding, under: Sequence[Finding]) -> tuple[int, int, float, str]:
    kinds = {"crash": 0, "failed_start": 0, "hang": 1, "desync": 1}
    incident = (finding, *under)
    return (
        SEVERITIES.index(_worst(finding, under)),
        min(kinds.get(other.kind, 2) for other in incident),
        -max(other.cost_throughput_ratio or 0.0 for other in incident),
        finding.key,
    )


def _deciding_kind(finding: Finding, results: Sequence[DetectorResult]) -> tuple[str, ...]:
    """Return what would make a doubtful verdict sure: inputs of detectors that could not look."""
    if finding.confidence >= POLICY.sure_confidence:
        return ()
    return _lacks(results, frozenset(kind_named(finding.kind).confirmed_by))


def _lacks(results: Sequence[DetectorResult], names: Set[str]) -> tuple[str, ...]:
    return tuple(
        f"{status.name}: {status.reason}; {status.remedy}"
        for status in (result.status for result in results)
        if status.state == "skipped" and status.name in names and status.remedy != NOT_HERE
    )


def answer_of(
    attempt: AttemptState | None,
    verdict: Verdict | None,
    findings: Sequence[Finding],
    coverage: Coverage,
    policy: Policy,
    left: Left | None = None,
) -> Answer:
    """Return the first sentence of the page. Missing data is never called health.

    `left` is how the command ended, None while it runs.
    """
    if verdict is not None:
        return Answer("culprit", verdict.what, verdict.why)
    if attempt is None or not attempt.known_ranks:
        return _unheard(left)
    notes = [f.what for f in findings if f.state == "open"]
    detail = "; ".join(notes)
    if coverage.reporting < coverage.expected:
        return Answer(
            "unknown",
            f"No verdict: partial, {coverage.text}",
            detail,
            _missing(coverage, is_recording=attempt.facts.is_recording),
        )
    steps = attempt.steps.num_steps + attempt.steps.dropped_steps
    world = attempt.world_size
    # Advice that cannot be given leaves the answer whether a rank is slow or stuck.
    statuses = [result.status for result in attempt.results]
    skipped = [status for status in statuses if status.state == "skipped"]
    if world == 1 and steps:
        return Answer(
            "unknown",
            f"No verdict: one rank, {steps:,} step{'s' * (steps != 1)}, no peer to compare it with",
            detail,
            ("a run of two or more ranks, or an earlier run of the same command",),
        )
    if steps < policy.min_steps:
        return _too_few(attempt, steps, detail, policy)
    # Steps of a recording have all ended, and a rank that hangs sends no spans: it is silent.
    ended_only = attempt.facts.is_recording or attempt.is_of_spans
    core = _CORE - {"hang"} if ended_only else _CORE
    unknown = [f"{one.name}: {one.reason}" for one in skipped if one.name in core]
    unknown += [gap.text for gap in attempt.gaps if gap.share > policy.healthy_missing_share]
    unknown += [text for result in attempt.results for text in result.not_known]
    if unknown:
        remedies = dict.fromkeys(gap.remedy for gap in attempt.gaps)
        deciding = (*_lacks(attempt.results, _CORE), *remedies)
        return Answer("unknown", f"No verdict: {'; '.join(unknown)}", detail, deciding)
    costly = [f for f in findings if f.state == "open" and not f.explained_by and _costs(f, policy)]
    if costly:
        return _advised(max(costly, key=lambda f: f.cost_throughput_ratio or 0.0))
    stop = next((f for f in findings if f.kind == "stopped" and f.state == "open"), None)
    if stop is not None and attempt.facts.left_code != 0:  # else its own command ended it
        return _stopped(stop, detail, policy)
    return _healthy(attempt, findings, coverage, notes, policy)


def _healthy(
    attempt: AttemptState,
    findings: Sequence[Finding],
    coverage: Coverage,
    notes: Sequence[str],
    policy: Policy,
) -> Answer:
    """Return the answer where all is known and nothing lost, with what could not be looked at."""
    skipped = [r.status.name for r in attempt.results if r.status.state == "skipped"]
    ran = len(attempt.results) - len(skipped)
    lacking = f"not looked at, for lack of input: {', '.join(skipped)}"
    over = [f for f in findings if f.state == "recovered" and f.severity != "info"]
    lost = f"; {sum(row.count for row in coverage.losses):,} records lost" * bool(coverage.losses)
    lost += "".join(f"; {gap.text}" for gap in attempt.gaps)
    thinned = thinned_share(attempt)  # a wrong call that did no harm in one of them is not seen
    if thinned:
        lost += f"; the single collectives of {percent_text(thinned)} of the steps are not known"
    lost += "".join(f"; {text}" for result in attempt.results for text in result.also_lost)
    world, steps = attempt.world_size, attempt.steps.num_steps + attempt.steps.dropped_steps
    return Answer(
        "healthy",
        f"Healthy: {world} ranks, {steps:,} steps, {ran} detectors found nothing above "
        f"{percent_text(policy.cost_info_ratio)} of throughput{' now' if over else ''}{lost}",
        "; ".join([*notes, *[lacking] * bool(skipped), *(f"over: {f.what}" for f in over[:3])]),
    )


def _stopped(stop: Finding, detail: str, policy: Policy) -> Answer:
    """Return the answer where a signal ended the job: it was well, and whether that was wanted is
    not known here."""
    return Answer(
        "unknown",
        f"Stopped from outside: {stop.why}; until then nothing was found above "
        f"{percent_text(policy.cost_info_ratio)} of throughput",
        detail,
        ("who sent the signal: the log of the scheduler or launcher, and the hosts' kernel logs",),
    )


def _unheard(left: Left | None) -> Answer:
    """Return what can be said of a run of which no rank was heard."""
    if left is None:
        return Answer("waiting", "No verdict yet: nothing was heard of a rank")
    return Answer("unknown", left_text(left), "", (_ITS_OUTPUT,))


def _too_few(attempt: AttemptState, steps: int, detail: str, policy: Policy) -> Answer:
    """Return what can be said of a run with too few steps: wait, unless there will be no more."""
    is_recording = attempt.facts.is_recording
    if is_recording or len(attempt.ended) >= max(attempt.world_size, 1):
        what = "the recording ends" if is_recording else "the run is over"
        return Answer(
            "unknown",
            f"No verdict: {what} after {steps:,} step{'s' * (steps != 1)}, {policy.min_steps} are "
            "needed",
            detail,
            (f"a run of {policy.min_steps} steps",),
        )
    return Answer(
        "waiting",
        f"No verdict yet: needs {policy.min_steps} steps, has {steps}",
        detail,
        _lacks(attempt.results, _CORE),
    )


def _costs(finding: Finding, policy: Policy) -> bool:
    return (finding.cost_throughput_ratio or 0.0) > policy.cost_info_ratio


def _advised(finding: Finding) -> Answer:
    """Return the answer where nothing is broken, and yet much is lost: that is not health."""
    share = percent_text(finding.cost_throughput_ratio or 0.0)
    following = (finding.next,) * bool(finding.next)
    if finding.onset_step is None or not _is_suspicion(finding):
        text = f"No fault; advice worth {share} of the throughput: {finding.what}"
        return Answer("advice", text, finding.why, following)
    # a suspicion accuses no rank in the first sentence
    text = (
        f"No verdict: {share} of the throughput may be lost since step {finding.onset_step:,}, "
        "not for long enough, or not clearly enough, to be sure"
    )
    return Answer("unknown", text, f"{finding.what}: {finding.why}", following)


def _is_suspicion(finding: Finding) -> bool:
    """Return whether it would be a fault if it were clearer: more work is none, however clear."""
    return finding.detector in _SUSPECT and finding.kind != MORE_WORK


def _missing(coverage: Coverage, *, is_recording: bool) -> tuple[str, ...]:
    """Return what would decide where ranks are missing: their own words."""
    if is_recording:
        return ("the files of the other ranks: import them together with these",)
    silent = [row.rank for row in coverage.silent]
    texts = []
    if silent:
        texts.append(
            f"the newest records of {ranks_text(silent)}; see that the node's collector runs, and "
            "its kernel log"
        )
    if coverage.reporting + len(silent) < coverage.expected:
        texts.append("records of the ranks that never reported; attach the agent to all ranks")
    return tuple(texts)
