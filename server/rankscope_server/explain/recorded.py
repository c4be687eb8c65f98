"""The answer from recordings of a run (dumps, traces): what the detectors say of them.

Families are those of the known errors; a kind of finding that is none of them is `other`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankscope_server.explain.inputs import Skipped
from rankscope_server.findings.finding import Finding
from rankscope_server.findings.kinds import kind_named
from rankscope_server.findings.text import confidence_word, percent_text
from rankscope_server.verdict.answers import Look


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the detectors say of the recordings of one job."""

    name: str
    look: Look


def read(paths: Sequence[Path]) -> tuple[list[Recorded], list[Skipped]]:
    """Return what the detectors say of each job, the worst first, and what cannot be read."""
    from rankscope_server.importers.recordings import jobs_of

    recordeds: list[Recorded] = []
    skipped: list[Skipped] = []
    jobs = jobs_of(paths)
    for job in jobs:
        look, unread = _read_job(job)
        skipped += unread
        if look is not None:
            name = str(job[0]) if len(job) == 1 else f"{len(job):,} dumps or traces"
            where = f" in {job[0].parent.name}" if len(jobs) > 1 and len(job) > 1 else ""
            recordeds.append(Recorded(name + where, look))
    return sorted(recordeds, key=lambda one: one.look.verdict is None), skipped


def _read_job(paths: Sequence[Path]) -> tuple[Look | None, list[Skipped]]:
    from rankscope_server.importers.recordings import RecordingError, look_at, read_recordings

    try:
        recording = read_recordings(paths)
    except RecordingError as error:
        return None, [Skipped(", ".join(map(str, paths)), str(error))]
    return look_at(recording), [Skipped("recordings", text) for text in recording.left_out]


def merge(answer: dict[str, Any], look: Look) -> dict[str, Any]:
    """Return the answer of the logs together with that of the recordings.

    A log that names what began it comes first: a recording shows who stood still, not why. A log
    that has only echoes of a stop gives way.
    """
    findings = [_finding(finding, look) for finding in look.findings if finding.severity != "info"]
    root = _root(look)
    logged = answer["root"]
    if root is not None and (logged is None or logged["role"] != "initiating"):
        if logged is not None:
            root["rivals"] = [*root["rivals"], _as_rival(logged)]
        answer = {**answer, "root": root}
    elif root is not None:
        logged = {**logged, "rivals": [*logged["rivals"], _as_rival(root)]}
        answer = {**answer, "root": logged}
    findings.sort(key=lambda finding: finding["role"] != "initiating")
    recorded = {
        "state": look.answer.state, "text": look.answer.text, "detail": look.answer.detail,
        "next": list(look.answer.deciding), "notes": list(look.answer.notes),
        "coverage": look.coverage.text,
    }  # fmt: skip
    return {**answer, "findings": [*findings, *answer["findings"]], "recorded": recorded}


def _root(look: Look) -> dict[str, Any] | None:
    verdict = look.verdict
    if verdict is None:
        return None
    cost, word = verdict.cost_throughput_ratio, confidence_word(verdict.confidence)
    others = [
        finding
        for finding in look.findings
        if finding.severity != "info"
        and finding.explained_by is None
        and finding.key != verdict.key
        and finding.state == "open"
    ]
    return {
        "family": family_of(verdict),
        "ranks": sorted(verdict.ranks),
        "signal": None,
        "cause": f"{verdict.what}: {verdict.why}",
        "remedy": verdict.next,
        "confidence": verdict.confidence,
        "confidence_text": verdict.confidence_text.removeprefix(f"{word}: "),
        "role": "initiating",
        "seen_on": sorted({*verdict.ranks, *verdict.victims}),
        "entry": None,
        "check": verdict.next_command,
        "sources": [],
        "would_be_wrong_if": verdict.would_be_wrong_if,
        "rivals": [_finding(other, look) for other in others],
        "kind": verdict.kind,
        "recorded": "; ".join((look.coverage.text, *look.answer.notes)),
        "cost": None if cost is None else f"{percent_text(cost)} of the job's throughput",
    }


def family_of(finding: Finding) -> str:
    """Return the family of known errors that a finding belongs to."""
    return kind_named(finding.kind).family


def _finding(finding: Finding, look: Look) -> dict[str, Any]:
    is_root = look.verdict is not None and look.verdict.key == finding.key
    role = "initiating" if is_root else "cascade" if finding.explained_by else "unknown"
    return {
        "family": family_of(finding),
        "role": role,
        "ranks": sorted(finding.ranks),
        "signal": None,
        "count": 1,
        "entry": None,
        "why_grouped": f"one finding of the detector {finding.detector}",
        "kind": finding.kind,
        "what": finding.what,
    }


def _as_rival(root: dict[str, Any]) -> dict[str, Any]:
    return {
        "family": root["family"], "role": root["role"], "ranks": root["ranks"],
        "signal": root["signal"], "count": 1, "entry": root["entry"],
        "why_grouped": "what the other kind of input says",
    }  # fmt: skip
