"""Words that the terminal and the page share."""

from __future__ import annotations

from datetime import UTC, datetime

from rankscope_server.api.findings.schema import ShownFinding
from rankscope_server.api.report.schema import Report
from rankscope_server.findings.text import percent_text, ranks_text, span_text

TITLES = {
    "culprit": "Culprit found", "advice": "No fault, advice", "healthy": "Nothing found",
    "waiting": "No verdict yet", "unknown": "No verdict",
}  # fmt: skip


def title(report: Report) -> str:
    """Return the headline above the first screen."""
    if report.verdict is not None:
        return f"{TITLES['culprit']}, {report.verdict.severity}"
    return TITLES[report.answer.state]


def time_text(time_ms: float | None) -> str:
    """Return a time of day with its date, in UTC; empty where it is not known."""
    if not time_ms:
        return ""
    return datetime.fromtimestamp(time_ms / 1e3, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def run_text(report: Report) -> str:
    """Return which run this is, in a sentence."""
    run = report.run
    parts = [run.name if run.name == run.run_id else f"{run.name} ({run.run_id})"]
    if run.world_size:
        parts.append(f"{run.world_size:,} rank{'s' * (run.world_size != 1)}")
    if run.hosts:
        hosts = f"{len(run.hosts)} hosts" if len(run.hosts) > 1 else run.hosts[0]
        parts.append(f"on {hosts}")
    if run.step:
        parts.append(f"step {run.step:,}")
    if run.attempt:
        parts.append(f"attempt {run.attempt}")
    if run.started_ms and run.last_seen_ms:
        lasted = max(0.0, run.last_seen_ms - run.started_ms) / 1e3
        parts.append(f"{span_text(lasted)} from {time_text(run.started_ms)}")
    return ", ".join(parts)


def finding_note(report: Report, finding: ShownFinding) -> str:
    """Return the note beside a finding: cost, state, and what explains it."""
    parts = []
    if finding.cost_throughput_ratio is not None:
        parts.append(f"{percent_text(finding.cost_throughput_ratio)} of throughput")
    if finding.state == "recovered":
        parts.append("over")
    cause = next((one for one in report.findings if one.id == finding.explained_by), None)
    if cause is not None:
        parts.append(f"explained by: {cause.kind} on {_who(cause.ranks)}")
    return "; ".join(parts)


def rank_states(report: Report) -> list[tuple[str, list[int]]]:
    """Return the ranks that are in each state, or have ended so, the most frequent last."""
    found: dict[str, list[int]] = {}
    for row in report.ranks:
        found.setdefault(row.exit_text or row.state, []).append(row.rank)
    return sorted(found.items(), key=lambda item: len(item[1]))


def _who(ranks: list[int]) -> str:
    return ranks_text(tuple(ranks)) if ranks else "the job"
