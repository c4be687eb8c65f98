"""What is said differently of a run without the agent: a recording, or one that sends spans."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from rankscope_server.diagnose.attempt import AttemptState
from rankscope_server.findings.finding import NOT_HERE, DetectorResult
from rankscope_server.findings.text import ms_text, percent_text

_ELSEWHERE = "not in this recording; the agent records it (rankscope run)"
_LONGER = "record more of it"
_REASONS = {  # said of a run that continues, and of a recording
    " has ended yet": " is recorded",
    " yet": "",
    "no collectives are recorded": "no step with collectives is recorded",
}


_OF_SPANS = {  # words of a reason, and the remedy
    "whose waits are known": "make a span of each collective (all_reduce, barrier, ...): without "
    "them it is not known what a rank waits for others",
    "no collectives are recorded": "make a span of each collective (all_reduce, barrier, ...)",
    "no rank has said yet where it is": "attach the agent (rankscope run): a span is sent when it "
    "ends, so where a rank is stuck is not known",
}


def as_recorded(result: DetectorResult) -> DetectorResult:
    """Return a result without advice to wait: nothing more will come of a recording."""
    status = result.status
    if status.name == "root-cause":  # most recordings hold no errors, even of runs that failed
        result = dataclasses.replace(result, checked=())
    if status.state != "skipped":
        return result
    remedy = _LONGER if status.reason.startswith("needs ") else _ELSEWHERE
    if status.remedy == NOT_HERE:
        remedy = NOT_HERE
    reason = status.reason
    for words, recorded in _REASONS.items():
        reason = reason.replace(words, recorded)
    return dataclasses.replace(
        result, status=dataclasses.replace(status, reason=reason, remedy=remedy)
    )


def as_of_spans(result: DetectorResult) -> DetectorResult:
    """Return a result with what the program of a rank can do, where it sends spans."""
    status = result.status
    for words, remedy in _OF_SPANS.items():
        if status.state == "skipped" and words in status.reason:
            return dataclasses.replace(result, status=dataclasses.replace(status, remedy=remedy))
    return result


def recorded_notes(attempt: AttemptState) -> tuple[str, ...]:
    """Return what a recording shows however short it is, and what it does not know."""
    facts = attempt.facts
    if not facts.is_recording:
        return ()
    notes = [text for text in (_shares(attempt),) if text]
    if (found := facts.slowdown) is not None:
        notes.append(
            f"S = {found.ratio:.3f}: a step takes {ms_text(found.step_ms)}, "
            f"{ms_text(found.ideal_ms)} if all ranks did each operation equally fast"
        )
    if facts.lacks_dates:
        notes.append("The recording holds no dates: its times count from the date of the file")
    return tuple(notes)


def _shares(attempt: AttemptState) -> str:
    """Return which shares of the recorded steps are waits, with how far steps differ."""
    table = attempt.steps
    if not table.num_steps:
        return ""
    took = table.get("duration").astype(float)
    waits = {"data": "waiting for data", "blocked": "waiting for other ranks or transfers"}
    texts = [
        f"{_share(values / took)} is {what}"
        for name, what in waits.items()
        if np.nansum(values := table.get(name).astype(float)) > 0  # else: not in the recording
    ]
    steps = table.num_steps
    which = "step" if steps == 1 else f"{steps:,} steps"
    what = f"Of the {which} recorded, {', '.join(texts)}"
    return what if texts else ""


def _share(shares: NDArray[np.float64]) -> str:
    """Return the mean over ranks and steps, with the steps of least and of most."""
    if not np.isfinite(shares).any():
        return "an unknown share"
    each = np.nanmean(shares[:, np.isfinite(shares).any(axis=0)], axis=0)
    text = percent_text(float(each.mean()))
    if len(each) < 2:
        return text
    return f"{text} ({percent_text(float(each.min()))} to {percent_text(float(each.max()))} a step)"
