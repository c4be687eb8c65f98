"""A run on paper: everything that a reader needs who was not there, verdict first."""

from __future__ import annotations

import sqlalchemy as sa

import rankscope
from rankscope.wire.schema import IMPORTED
from rankscope_server.answers import capped
from rankscope_server.api.findings.queries import findings
from rankscope_server.api.findings.schema import Detector, Findings, ShownFinding, ShownVerdict
from rankscope_server.api.logs.queries import logs
from rankscope_server.api.overview.queries import overview
from rankscope_server.api.overview.schema import Coverage, ShownAnswer
from rankscope_server.api.ranks.errors import errors
from rankscope_server.api.ranks.queries import ranks
from rankscope_server.api.ranks.schema import RankRow
from rankscope_server.api.report.parts import Origin, answer_of, cost_text
from rankscope_server.api.report.schema import REPORT_FORMAT, Report, SummaryRow
from rankscope_server.api.runs.environment import environment
from rankscope_server.api.runs.queries import run_row
from rankscope_server.api.runs.schema import RunSummary
from rankscope_server.api.steps.budget import budget
from rankscope_server.api.steps.queries import RECENT_STEPS
from rankscope_server.findings.finding import SEVERITIES
from rankscope_server.findings.text import confidence_word
from rankscope_server.search.tree import Names, Not
from rankscope_server.store.search import LogQuery

MAX_RANKS = 256
MAX_LINES = 200


def report(
    connection: sa.Connection,
    run_id: str,
    now_ns: int,
    silent_after_seconds: float,
    origin: Origin,
) -> Report:
    """Return the report of a run. Raises Problem 404."""
    run = run_row(connection, run_id)
    silent_before_ns = now_ns - int(silent_after_seconds * 1e9)
    first = overview(connection, run_id, silent_before_ns)
    found = findings(connection, run)
    everyone = ranks(connection, run, None, silent_before_ns).ranks
    answer = answer_of(first.answer, first.run, origin)
    shown = _first_ranks(everyone, first.verdict)
    said = Not(Names("stream", ("finding",)))  # findings have a part of their own
    last = logs(connection, run_id, LogQuery(said), MAX_LINES)
    is_recording = run.launcher == IMPORTED
    return Report(
        format=REPORT_FORMAT,
        made_ms=now_ns / 1e6,
        made_by=f"rankscope {rankscope.__version__}",
        source=origin.source,
        run=first.run,
        summary=summary(first.run, first.verdict, answer, first.coverage, found.detectors),
        verdict=first.verdict,
        answer=answer,
        numbers=first.numbers,
        findings=_worst_first(found, first.verdict),
        detectors=found.detectors,
        coverage=first.coverage,
        not_measured=not_measured(first.coverage, found.detectors, is_recording=is_recording),
        budget=budget(connection, run, RECENT_STEPS),
        attempts=first.attempts,
        ranks=shown,
        errors=errors(connection, run_id).groups,
        environment=environment(connection, run_id, run.attempt, run.world_size),
        lines=sorted(last.lines, key=lambda line: line.time_ms),
        notes=[*origin.notes, *(first.coverage.notes if is_recording else ())],
        ranks_capped=capped(len(shown), len(everyone)),
        lines_capped=capped(min(last.total, MAX_LINES), last.total),
    )


def summary(
    run: RunSummary,
    verdict: ShownVerdict | None,
    answer: ShownAnswer,
    coverage: Coverage,
    detectors: list[Detector],
) -> list[SummaryRow]:
    """Return the first screen: what, why, cost, next, how sure, what would make it wrong."""
    if verdict is None:
        return _without_verdict(run, answer, coverage, detectors)
    sure = "not known"
    if verdict.confidence is not None:
        sure = _sure(verdict.confidence, verdict.confidence_text)
    rows = [
        SummaryRow(key="what", label="What", text=verdict.what),
        SummaryRow(key="why", label="Why", text=verdict.why),
        SummaryRow(key="cost", label="Cost", text=cost_text(verdict, run)),
        SummaryRow(key="next", label="Next", text=verdict.next),
        SummaryRow(key="command", label="Command", text=verdict.next_command),
        SummaryRow(key="sure", label="Sure", text=sure),
        SummaryRow(key="wrong_if", label="Disproved if", text=verdict.would_be_wrong_if),
        SummaryRow(key="ruled_out", label="Ruled out", text="; ".join(verdict.ruled_out)),
        SummaryRow(
            key="explains",
            label="Explains",
            text="; ".join(folded.what for folded in verdict.folded),
        ),
    ]
    return [row for row in rows if row.text]


def not_measured(
    coverage: Coverage, detectors: list[Detector], *, is_recording: bool = False
) -> list[str]:
    """Return what was not measured, and why: it is not known to be healthy."""
    rows = []
    if coverage.registered < coverage.expected:
        missing = coverage.expected - coverage.registered
        lack = "not in the recording" if is_recording else "never heard of"
        rows.append(f"{missing:,} of {coverage.expected:,} ranks: {lack}")
    rows += [
        f"{row.source} on {row.host or 'the node'}"
        f"{f', rank {row.rank}' if row.rank >= 0 else ''}: {row.count:,} lost, {row.reason}"
        for row in coverage.losses
    ]
    if (cut := coverage.losses_capped) is not None:
        rows.append(f"{cut.total - cut.shown:,} more reasons for which less was lost")
    rows += () if is_recording else coverage.notes
    rows += [
        f"{detector.name}: {detector.reason}"
        for detector in detectors
        if detector.state == "skipped"
    ]
    return rows


def _without_verdict(
    run: RunSummary, answer: ShownAnswer, coverage: Coverage, detectors: list[Detector]
) -> list[SummaryRow]:
    skipped = [detector for detector in detectors if detector.state == "skipped"]
    ran = len(detectors) - len(skipped)
    why = "; ".join(text for text in (answer.detail, coverage.text) if text)
    rows = [
        SummaryRow(key="what", label="What", text=answer.text),
        SummaryRow(key="why", label="Why", text=why),
        SummaryRow(key="cost", label="Cost", text=_no_cost(answer)),
        SummaryRow(key="next", label="Next", text=_next(answer, skipped)),
        SummaryRow(
            key="sure", label="Sure", text=f"{ran} of {len(detectors)} detectors had their input"
        ),
        SummaryRow(
            key="wrong_if",
            label="Disproved if",
            text="the cause is in what was not measured, below",
        ),
    ]
    return [row for row in rows if row.text]


def _no_cost(answer: ShownAnswer) -> str:
    if answer.state == "healthy":
        return "Nothing above the thresholds of the detectors"
    if answer.state == "advice":
        return "As said above: no rank is at fault, this is what another setting would give"
    return "Not known while there is no verdict"


def _next(answer: ShownAnswer, skipped: list[Detector]) -> str:
    if answer.state == "healthy":
        return "Nothing to do"
    if answer.state == "advice" and answer.deciding:
        return answer.deciding[0]
    if answer.state == "waiting":
        return "Wait for more steps: so far there is too little to compare"
    idle = ("wait", "nothing to do", "")
    remedy = next((detector for detector in skipped if detector.remedy.lower() not in idle), None)
    if remedy is None:
        return "Read what was not measured, below; a longer record decides"
    return f"{remedy.remedy[:1].upper()}{remedy.remedy[1:]} ({remedy.name} lacks it)"


def _sure(confidence: float, text: str) -> str:
    word = confidence_word(confidence)
    return text if text.lower().startswith(word) else f"{word}: {text}"


def _first_ranks(everyone: list[RankRow], verdict: ShownVerdict | None) -> list[RankRow]:
    """Return at most `MAX_RANKS`: culprits, then who is not well, then the others."""
    named = set(verdict.ranks) if verdict else set()
    order = sorted(
        everyone,
        key=lambda row: (row.rank not in named, row.state in ("running", "ended"), row.rank),
    )
    return sorted(order[:MAX_RANKS], key=lambda row: (row.rank not in named, row.rank))


def _worst_first(found: Findings, verdict: ShownVerdict | None) -> list[ShownFinding]:
    """Return the open findings, that of the verdict first, then by severity; then what is over."""
    chosen = verdict.id if verdict else None
    worst: dict[str, int] = {name: place for place, name in enumerate(SEVERITIES)}
    still = sorted(
        found.open, key=lambda finding: (finding.id != chosen, worst.get(finding.severity, 9))
    )
    return [*still, *found.recovered]
