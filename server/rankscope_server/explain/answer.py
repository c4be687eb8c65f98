"""The answer as data: a contract that other programs rely on (docs/explain.md)."""

from __future__ import annotations

from typing import Any

from rankscope_server.known_errors.evaluation import Evaluation, Root
from rankscope_server.known_errors.tally import Group

_UNKNOWN_CAUSE = {
    "user_exception_one_rank": "The program raised an error that is not a known one: {what}",
    "other": "A fault that is not a known one",
}
_UNKNOWN_REMEDY = (
    "Read the traceback or the lines around this one on that rank, fix what they name, then restart"
)
_DISPROOF = {
    "initiating": "an earlier first error is in a log that was not given, or the program "
    "caught this one and went on",
    "cascade": "the log of the rank where it began is given too: its own line then comes first",
    "teardown": "a line before the stop, in a log that was not given, reports a failure",
}


def answer(evaluation: Evaluation) -> dict[str, Any]:
    """Return the root, or None for logs without a fault, and every group that was found."""
    root = evaluation.root
    return {
        "root": None if root is None else _root(root),
        "findings": [_finding(group) for group in evaluation.groups],
        "num_ungrouped": evaluation.num_ungrouped,
    }


def _root(root: Root) -> dict[str, Any]:
    group = root.group
    return {
        "family": group.family,
        "ranks": list(root.ranks),
        "signal": root.signal,
        "cause": cause_of(group),
        "remedy": remedy_of(group),
        "confidence": root.confidence,
        "confidence_text": root.reason,
        "role": group.role,
        "seen_on": sorted(group.ranks),
        "entry": group.entry.id if group.entry else None,
        "check": group.entry.check if group.entry else "",
        "sources": list(group.entry.sources) if group.entry else [],
        "would_be_wrong_if": _DISPROOF.get(group.role or "", ""),
        "rivals": [_finding(rival) for rival in root.rivals],
    }


def _finding(group: Group) -> dict[str, Any]:
    return {
        "family": group.family,
        "role": group.role or "unknown",
        "ranks": sorted(group.ranks),
        "signal": group.signal,
        "count": group.count,
        "entry": group.entry.id if group.entry else None,
        "why_grouped": group.why_grouped or "the same known error",
    }


def cause_of(group: Group) -> str:
    """Return what happened, in a sentence."""
    if group.entry is not None:
        return group.entry.cause
    return _UNKNOWN_CAUSE.get(group.family, _UNKNOWN_CAUSE["other"]).format(what=group.what[:200])


def remedy_of(group: Group) -> str:
    """Return what to do."""
    return group.entry.remedy if group.entry is not None else _UNKNOWN_REMEDY
