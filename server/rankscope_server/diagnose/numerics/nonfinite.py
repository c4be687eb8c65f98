"""NaN and infinity: which rank brought it in, at which step.

After the reduction every rank looks guilty, so only what a rank flagged before it counts: its own
loss, and its own gradients where they were sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rankscope.wire.schema import STEP_SKIPPED
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import (
    DetectorResult,
    Evidence,
    Finding,
    Severity,
    ran,
    skipped,
)
from rankscope_server.findings.text import capital, ranks_text

_LOSS, _LOCAL, _REDUCED = "loss_nonfinite", "gradient_local_nonfinite", "gradient_nonfinite"
_WORDS = {_LOSS: "loss", _LOCAL: "gradients before the reduction", _REDUCED: "reduced gradients"}


@dataclass(frozen=True, slots=True)
class NanOrigin:
    """Where it began. `ranks` is empty where the origin was not captured; `why` says why."""

    step: int
    ranks: tuple[int, ...]
    seen_in: str
    why: str
    is_clear: bool  # the others are known to have been finite in that step
    last_step: int  # newest step with a flag
    is_open: bool
    overflows: int  # longest row of steps that a gradient scaler skipped; -1: not a scaler's


class NonFinite:
    """Finds NaN and infinity in losses and gradients, and the rank that brought them in."""

    name: ClassVar[str] = "nan"
    finds: ClassVar[str] = "NaN and infinity, and the rank that brought them in"
    needs: ClassVar[str] = "losses or gradient norms"
    silent: ClassVar[str] = "a gradient scaler skipped few steps: info"

    def look(self, window: Window) -> DetectorResult:
        """Return the first NaN of an attempt."""
        numbers = window.facts.numbers
        if not numbers.has_finite:
            return skipped(
                self,
                "no loss or gradient norm was recorded",
                "train with backward() or call rankscope.log_metrics(step, loss=...)",
            )
        if not numbers.flagged:
            return ran(self, checked=("loss and gradients: finite wherever recorded",))
        return ran(self, [_finding(window, origin_of(window))])


def origin_of(window: Window) -> NanOrigin:
    """Return where the first NaN came from; there must be one."""
    numbers = window.facts.numbers
    by_kind = {
        kind: {rank: one for (name, rank), one in numbers.flagged.items() if name == kind}
        for kind in (_LOSS, _LOCAL, _REDUCED)
    }
    own = {kind: flagged for kind, flagged in by_kind.items() if kind != _REDUCED and flagged}
    first_own = min((f.first_step for flagged in own.values() for f in flagged.values()),
                    default=1 << 62)  # fmt: skip
    first_reduced = min((f.first_step for f in by_kind[_REDUCED].values()), default=1 << 62)
    step = min(first_own, first_reduced)
    last = max(max(f.steps) for f in numbers.flagged.values())
    finite = min((f.last_finite_step for f in numbers.flagged.values()), default=-1)
    is_open, overflows = finite <= last, _overflows(window)
    if first_reduced < first_own:
        why = (
            "it showed in the reduced gradients first, in which all ranks look alike; gradients "
            "before the reduction are sampled"
        )
        return NanOrigin(step, (), _REDUCED, why, False, last, is_open, overflows)
    sampled = any(flag.first_step == step for flag in own.get(_LOCAL, {}).values())
    kind = _LOCAL if sampled else _LOSS
    ranks = tuple(sorted(rank for rank, f in own[kind].items() if f.first_step == step))
    why = _why_unnamed(window, kind, ranks)
    if why:
        return NanOrigin(step, (), kind, why, False, last, is_open, overflows)
    return NanOrigin(
        step,
        ranks,
        kind,
        "",
        _others_are_finite(window, kind, step, ranks),
        last,
        is_open,
        overflows,
    )


def _why_unnamed(window: Window, kind: str, ranks: tuple[int, ...]) -> str:
    """Return why those flagged first are not accused; empty where they are."""
    known = len(window.facts.numbers.row_of)
    if len(ranks) > 1 and len(ranks) > window.policy.global_share * known:
        return f"{len(ranks)} of {known} ranks had it in the same step"
    staged = any(window.ranks[rank].num_stages > 1 for rank in ranks if rank in window.ranks)
    if kind == _LOSS and staged:
        return "the last stage of a pipeline shows what any stage before it may have brought in"
    return ""


def _others_are_finite(window: Window, kind: str, step: int, ranks: tuple[int, ...]) -> bool:
    numbers = window.facts.numbers
    name = "loss" if kind == _LOSS else "gradient_norm_local"
    column = numbers.column(name, step)
    others = [row for rank, row in numbers.row_of.items() if rank not in ranks]
    return bool(others) and bool(np.mean(~np.isnan(column[others])) >= 0.9)


def _overflows(window: Window) -> int:
    """Return the longest row of skipped steps if a scaler skipped all that was flagged, else -1."""
    numbers, table = window.facts.numbers, window.steps
    if any(name == _LOSS for name, _ in numbers.flagged):
        return -1
    flagged = set().union(*(flag.steps for flag in numbers.flagged.values()))
    skipped_at = np.any(table.flags() & STEP_SKIPPED, axis=0)
    known = flagged & set(table.steps.tolist())
    if not known or not known <= set(table.steps[skipped_at].tolist()):
        return -1
    longest = row = 0
    for is_skipped in skipped_at.tolist():
        row = row + 1 if is_skipped else 0
        longest = max(longest, row)
    return longest


def _severity(window: Window, origin: NanOrigin) -> Severity:
    if origin.overflows >= 0:
        few = origin.overflows <= window.policy.max_skipped_overflows
        return "info" if few else "warning"
    return "critical" if origin.is_open else "warning"


def _finding(window: Window, origin: NanOrigin) -> Finding:
    seen, step = _WORDS[origin.seen_in], origin.step
    hosts = window.hosts(origin.ranks)
    confidence = 0.6 if not origin.ranks else 0.95 if origin.is_clear else 0.75
    reasons = (
        "who brought it in was not captured" if not origin.ranks
        else "all other ranks were finite in that step" if origin.is_clear
        else "not all other ranks recorded that step"
    )  # fmt: skip
    return window.finding(
        "nan",
        origin.step,
        severity=_severity(window, origin),
        is_over=not origin.is_open,
        ranks=origin.ranks,
        hosts=hosts,
        onset_step=step,
        ended_step=None if origin.is_open else origin.last_step,
        what=_what(window, origin),
        why=_why(origin, seen),
        next=_next(origin),
        confidence=(confidence, reasons),
        evidence=_evidence(window, origin),
        ruled_out=("The ranks whose loss is NaN later: they took it over with the reduction",)
        if origin.ranks
        else (),
        disproof="A number of the same step that was not recorded was NaN elsewhere first",
        victims=tuple(sorted(set(window.facts.numbers.row_of) - set(origin.ranks)))
        if origin.ranks
        else (),
    )


def _what(window: Window, origin: NanOrigin) -> str:
    step, seen = origin.step, _WORDS[origin.seen_in]
    if origin.overflows >= 0:
        return f"The gradient scaler skipped steps with infinite gradients since step {step:,}"
    over = "" if origin.is_open else f", over since step {origin.last_step:,}"
    if origin.ranks:
        who = window.who(origin.ranks)
        return f"{who} brought NaN or infinity into the training at step {step:,}{over}"
    return f"NaN or infinity in the {seen} since step {step:,}{over}"


def _why(origin: NanOrigin, seen: str) -> str:
    if origin.overflows >= 0:
        return (
            f"At most {origin.overflows} steps in a row were skipped, then the scale fitted again"
        )
    if not origin.ranks:
        return f"First seen in the {seen} of step {origin.step:,}; {origin.why}"
    rest = "; those of all other ranks were finite then" if origin.is_clear else ""
    return f"First seen in the {seen} of {ranks_text(origin.ranks)} at step {origin.step:,}{rest}"


def _next(origin: NanOrigin) -> str:
    if origin.overflows >= 0:
        return "Nothing if it stays rare; a scale that keeps falling means losses that overflow"
    if origin.ranks:
        return (
            f"Run the batch of {ranks_text(origin.ranks)} at step {origin.step:,} on another rank: "
            "NaN again means the data or the model, a finite loss means the GPU or its memory; "
            "go on from a checkpoint saved before that step"
        )
    return (
        f"Go on from a checkpoint saved before step {origin.step:,} with "
        "torch.autograd.set_detect_anomaly(True) for a few steps, to see which module it comes from"
    )


def _evidence(window: Window, origin: NanOrigin) -> tuple[Evidence, ...]:
    flagged = window.facts.numbers.flagged
    facts = []
    for kind, words in _WORDS.items():
        steps = [flag.first_step for (name, _), flag in flagged.items() if name == kind]
        if steps:
            facts.append(
                Evidence(f"{capital(words)}: {len(steps)} ranks, first at step {min(steps):,}")
            )
    facts += [
        Evidence(f"Rank {rank} at step {origin.step:,}", window.link(rank, origin.step))
        for rank in origin.ranks[:4]
    ]
    return tuple(facts)
