"""What the log of a rank says of its end: libraries print what no exception says.

NCCL, gloo and the watchdogs of torch write to stderr and leave; the kernel writes to its own log.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import replace

from rankscope_server.diagnose.window import Window
from rankscope_server.findings.text import cut
from rankscope_server.known_errors.load import known_errors, order
from rankscope_server.known_errors.templates import template
from rankscope_server.observe.failures import Failure, Role, is_abort
from rankscope_server.observe.last_lines import last_of, why_of
from rankscope_server.observe.line_table import LAUNCHER, Row, recognise_line

_KILLED_BY_KERNEL = "killed by the kernel, which ran out of memory"
_ROLES: tuple[Role, ...] = ("initiating", "cascade", "teardown")
_TERMINATE = "terminate called"  # what the C++ runtime prints before it aborts a process
_TRACEBACK = "Traceback (most recent call last)"
_SURE = 3  # strength of an entry that is a cause in itself
_KNOWN = 2


def with_last_words(window: Window, failures: Iterable[Failure]) -> list[Failure]:
    """Return the failures with what the logs say of each end."""
    found = [_of_kernel(window, failure) for failure in failures]
    return [_of_printed(window, _of_lines(window, failure)) for failure in found]


def _of_kernel(window: Window, failure: Failure) -> Failure:
    """Return a killed rank with what the kernel's log says of its process, or of one beside it."""
    if failure.ended is None or failure.ended.signal != signal.SIGKILL or failure.entry is not None:
        return failure
    around_ns = window.policy.last_words_after_seconds * 1e9
    for event in window.facts.machines.events.values():
        is_near = abs(event.time_ns - failure.time_ns) <= around_ns
        if event.name == "oom kill" and event.rank == failure.rank and is_near:
            text = event.fields.get("text", _KILLED_BY_KERNEL)
            entry = recognise_line(text) or known_errors().named("oom-killer")
            return replace(
                failure, text=f"{failure.text.split(' (')[0]} ({_KILLED_BY_KERNEL})",
                line=cut(text), entry=entry,
            )  # fmt: skip
    return failure


def _of_lines(window: Window, failure: Failure) -> Failure:
    """Return a failure with the class, and the entry, of the line that says most of it."""
    rows = _rows(window, failure, failure.rank, window.policy.last_words_seconds)
    known = _known(rows, failure.rank)
    if not known and is_abort(failure):
        near_s = window.policy.last_words_after_seconds
        printed = _known(_rows(window, failure, LAUNCHER, near_s), LAUNCHER)
        known = [row for row in printed if _TERMINATE in row.text]
    if not known:
        return _of_unknown(failure, rows) if failure.is_weak and rows else failure
    best = known[0]
    entry = best.entry
    assert entry is not None
    line = cut(best.text)
    role = next(role for role in _ROLES if role == entry.role)
    if failure.is_weak and entry.strength >= _KNOWN:
        text = f"{failure.text.split(' without')[0]} after: {cut(best.text, 120)}"
        return replace(failure, role=role, text=text, line=line, entry=entry, is_weak=False)
    is_symptom = failure.entry is None or failure.entry.strength < _KNOWN
    if is_abort(failure) and entry.strength >= _KNOWN and is_symptom:
        return replace(failure, role=role, line=line, entry=entry)
    if failure.role == "cascade" and role == "initiating" and _is_own(window, best):
        text = f"{failure.text.split(': ')[0]}, after: {cut(best.text, 120)}"
        return replace(failure, role=role, text=text, line=line, entry=entry)
    if failure.role == role and failure.entry is None and entry.strength >= _KNOWN:
        return replace(failure, line=line, entry=entry)
    return failure


def _of_printed(window: Window, failure: Failure) -> Failure:
    """Return an end without a reason with the line of output that says why.

    What only the launcher passed on may be any rank's: it counts where it was said as the rank
    ended.
    """
    if not failure.is_weak or failure.line or failure.ended is None:
        return failure
    line = why_of(_news(window, failure))
    if not line:
        return failure
    return replace(failure, text=failure.text.split(" without")[0], line=line)


def last_line(window: Window, failure: Failure) -> str:
    """Return the line that a rank wrote last, whether or not it says why; empty where unknown."""
    return last_of(_news(window, failure))


def _news(window: Window, failure: Failure) -> list[str]:
    """Return what was said last as a rank ended and is not usual, its own lines first."""
    policy, last = window.policy, window.lines.last
    before_ns, near_ns = int(policy.last_words_seconds * 1e9), int(policy.last_line_seconds * 1e9)
    own = last.before(failure.rank, failure.time_ns, before_ns, near_ns)
    passed_on = last.before(LAUNCHER, failure.time_ns, near_ns, near_ns)
    return [text for text in (*own, *passed_on) if _is_news(window, text)]


def _is_news(window: Window, text: str) -> bool:
    """Return whether a line is not usual, and no known error but for one that is a cause."""
    entry = recognise_line(text)
    if entry is not None and (entry.role != "initiating" or entry.strength < _KNOWN):
        return False
    row = window.lines.rows.get(f"? {template(text)}" if entry is None else entry.id)
    return row is None or not _is_usual(window, row)


def _rows(window: Window, failure: Failure, rank: int, before_s: float) -> list[Row]:
    """Return what a rank, or a launcher, said around a failure and does not say usually."""
    after_ns = int(window.policy.last_words_after_seconds * 1e9)
    near = window.lines.near(rank, failure.time_ns, int(before_s * 1e9), after_ns)
    return [row for row in near if not _is_usual(window, row)]


def _known(rows: Iterable[Row], rank: int) -> list[Row]:
    """Return those that are known errors, those that say most first."""
    known = [row for row in rows if row.entry is not None and row.entry.role in _ROLES]
    return sorted(known, key=lambda row: _order(row, rank))


def _of_unknown(failure: Failure, rows: list[Row]) -> Failure:
    """Return an end without a reason with the error that its rank logged last.

    A traceback is the reason: frameworks log what the script raised, and leave with a code.
    """
    newest = max(rows, key=lambda row: row.said[failure.rank])
    if _TRACEBACK not in newest.text:
        return replace(failure, line=cut(newest.text))
    raised = cut(newest.text.rstrip().rpartition("\n")[2], 120)
    text = f"{failure.text.split(' without')[0]} after it logged {raised}"
    return replace(failure, text=text, line=raised, is_weak=False)


def _order(row: Row, rank: int) -> tuple[int, int, int]:
    assert row.entry is not None
    return order(row.entry)[0], -row.entry.strength, row.said[rank][0]


def _is_own(window: Window, row: Row) -> bool:
    """Return whether few ranks say it, and it names a cause in itself: no echo does that."""
    few = max(1, int(window.world_size * window.policy.rare_ratio))
    return (
        row.entry is not None
        and row.entry.strength >= _SURE
        and len(row.said.keys() - {LAUNCHER}) <= few
    )


def _is_usual(window: Window, row: Row) -> bool:
    """Return whether the same was said where nothing went wrong: in a rank that ended well, in an
    earlier run, or in this one long before any failure."""
    if row.key in window.usual_lines:
        return True
    return any(
        end.reason == "clean" and end.exit_code in (0, None) and rank in row.said
        for rank, end in window.ended.items()
    )
