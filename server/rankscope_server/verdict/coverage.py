"""How much of an attempt is seen, and what state the run is in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rankscope_server.diagnose.attempt import AttemptState
from rankscope_server.findings.finding import Finding
from rankscope_server.findings.policy import Policy
from rankscope_server.findings.text import percent_text, ranks_text
from rankscope_server.observe.thinning import thinning_notes
from rankscope_server.verdict.answers import Coverage, LossRow, RunStatus, SilentRank

NO_MORE_HEARD = "No rank reports any more"
_MAX_SILENT = 256

# of a shell, and of `rankscope run`
_EXITS = {126: "it cannot be started", 127: "it was not found"}


@dataclass(frozen=True, slots=True)
class Left:
    """How a command ended; `why` is the line of its output that says why, empty where none does."""

    code: int
    why: str = ""


def coverage_of(attempt: AttemptState | None, now_ns: int, policy: Policy) -> Coverage:
    """Return which ranks report. A rank that ended reported; one that vanished did not."""
    if attempt is None:
        return Coverage(0, 0, 0, (), (), "No rank reports yet")
    expected = attempt.world_size
    ended = attempt.ended
    quiet_ns = policy.silent_seconds * 1e9
    is_recording = attempt.facts.is_recording
    silent = [
        rank
        for rank in sorted(attempt.known_ranks)
        if rank not in ended and now_ns - attempt.heard_ns.get(rank, 0) > quiet_ns
        and not is_recording
    ]  # fmt: skip
    known = attempt.known_ranks
    reporting = len(known) - len(silent)
    losses = tuple(
        LossRow(_host(attempt, loss.rank), loss.rank, loss.source, loss.reason, loss.count)
        for _, loss in sorted(attempt.losses.items())
        if loss.count > 0
    )
    text = f"{reporting:,} of {expected:,} ranks {'recorded' if is_recording else 'reporting'}"
    missing = [rank for rank in range(expected) if rank not in known]
    if is_recording and max(known, default=0) >= expected:  # one of each group, as open traces
        text, missing = f"{len(known)} ranks recorded, numbered up to {max(known)}", []
    if missing:
        text += f"; {ranks_text(missing)} {'not among them' if is_recording else 'never heard of'}"
    if silent:
        text += f"; nothing from {ranks_text(silent)} for {policy.silent_seconds:.0f} s or more"
    if losses:
        text += f"; {sum(row.count for row in losses):,} records lost"
    return Coverage(
        expected=expected,
        registered=len(attempt.ranks),
        reporting=reporting,
        silent=tuple(_silent(attempt, rank) for rank in silent[:_MAX_SILENT]),
        losses=losses,
        text=text,
    )


def notes_of(attempt: AttemptState) -> tuple[str, ...]:
    """Return what is recorded in part, or of some ranks alone, a sentence each."""
    notes = thinning_notes(attempt.facts.thinning)
    share = thinned_share(attempt)
    if not notes and share:
        notes = (f"Of {percent_text(share)} of the steps single collectives are not recorded",)
    return (*notes, *(gap.text for gap in attempt.gaps))


def thinned_share(attempt: AttemptState) -> float:
    """Return of which share of the steps single collectives are not recorded, on any rank."""
    steps = attempt.steps
    return float(np.mean(steps.thinned())) if steps.num_steps else 0.0


def left_text(left: Left) -> str:
    """Return what became of a command of which no rank was heard."""
    code = left.code
    how = _EXITS.get(code) or (f"signal {code - 128}" if 128 < code < 160 else "")
    text = f"The command ended with exit code {code}{f' ({how})' * bool(how)} before any rank began"
    return f"{text}: {left.why}" if left.why and code else text


def _recorded(attempt: AttemptState) -> str:
    steps = attempt.steps.num_steps + attempt.steps.dropped_steps
    return f"a recording of {steps:,} step{'s' * (steps != 1)}" if steps else "a recording"


def _silent(attempt: AttemptState, rank: int) -> SilentRank:
    seen = attempt.seen_ns(rank)
    state = attempt.states.get(rank)
    return SilentRank(rank, None if seen is None else seen / 1e6, state.step if state else 0)


def _host(attempt: AttemptState, rank: int) -> str:
    known = attempt.ranks.get(rank)
    return known.host if known else ""


def _ends_text(attempt: AttemptState) -> str:
    """Return how many ranks ended well: of a job that trains on without some, not all."""
    clean = sum(end.reason == "clean" for end in attempt.ended.values())
    many = f"all {clean}" if clean == len(attempt.ended) else f"{clean} of {len(attempt.ended)}"
    return f"{many} ranks ended cleanly"


def status_of(
    attempt: AttemptState | None,
    findings: Sequence[Finding],
    coverage: Coverage,
    left: Left | None = None,
) -> tuple[RunStatus, str]:
    """Return the status of a run and one sentence on it; `left` is the end of its command."""
    if attempt is None or not attempt.known_ranks:
        if left is None:
            return "starting", "nothing was heard of a rank yet"
        return "failed" if left.code else "ended", left_text(left)
    mine = [f for f in findings if f.attempt == attempt.attempt and f.state == "open"]
    ended = attempt.ended
    is_over = len(ended) >= max(attempt.world_size, 1)
    crash = next((f for f in mine if f.detector == "root-cause" and f.severity != "info"), None)
    hang = next((f for f in mine if f.kind == "hang"), None)
    is_of_hang = crash is not None and hang is not None and crash.explained_by == hang.key
    if crash is not None and not is_of_hang:
        return "failed", crash.what
    if hang is not None and (is_over or is_of_hang):
        return "failed", f"stopped while stuck: {hang.what}"
    if is_over:
        stop = next((f for f in mine if f.detector == "root-cause"), None)
        return "ended", stop.what if stop else _ends_text(attempt)
    if attempt.facts.is_recording:
        return ("stuck", hang.what) if hang is not None else ("ended", _recorded(attempt))
    if coverage.expected and coverage.reporting == len(ended):
        return "silent", coverage.text
    if hang is not None:
        return "stuck", hang.what
    if not attempt.steps.num_steps:
        return "starting", f"{len(attempt.ranks)} of {attempt.world_size} ranks are up, no step yet"
    return "running", f"step {attempt.step:,}"
