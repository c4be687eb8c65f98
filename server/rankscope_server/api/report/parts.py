"""Parts of a report that need no store, so that a reader without a server has them too."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope_server.api.findings.schema import ShownFinding
from rankscope_server.api.overview.schema import ShownAnswer
from rankscope_server.api.runs.schema import RunSummary
from rankscope_server.findings.text import hours_text, percent_text
from rankscope_server.store.deletion import OVER

_STOPPED = ("hang", "crash", "failed_start", "desync")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a report is read, and what of it could not be."""

    source: str
    notes: tuple[str, ...] = ()
    is_open_ended: bool = False  # the record stops before the ranks ended


def cost_text(finding: ShownFinding, run: RunSummary) -> str:
    """Return what a finding costs, in words that also say when it is not known."""
    ratio = finding.cost_throughput_ratio
    if ratio is None:
        if finding.kind in _STOPPED:
            world = f" of {run.world_size:,} ranks" if run.world_size else ""
            return f"All throughput{world} since then: no rank gets further"
        return "Not known: what this finding rests on has no time in it"
    text = f"{percent_text(ratio)} of the job's throughput"
    is_over = run.status in OVER
    hours = finding.cost_rank_hours if is_over else finding.cost_rank_hours_per_day
    if hours is not None:
        text += f", {hours_text(hours)}{'' if is_over else ' a day'}"
    return text


def answer_of(answer: ShownAnswer, run: RunSummary, origin: Origin) -> ShownAnswer:
    """Return the first sentence: a record that just stops is never called healthy."""
    if not origin.is_open_ended or answer.state != "healthy":
        return answer
    text = f"No verdict: the record stops in step {run.step:,}, how its ranks ended is not known"
    return ShownAnswer(state="unknown", text=text, detail=f"up to there: {answer.text}")
