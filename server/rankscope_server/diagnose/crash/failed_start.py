"""A program that ends before any rank has done a step: its own sentence says why.

A setting that it refuses, a file or a package that is not there, a port that is in use: the line by
which it said so is what its user needs, and where all ranks fail alike none of them is to blame.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from rankscope_server.diagnose.crash.last_words import last_line
from rankscope_server.diagnose.crash.words import CrashCause, crash_next, is_before_training
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.text import capital, cut, ranks_text
from rankscope_server.observe.failures import Failure

_MOST_TEXT = 240
_FRAME = re.compile(r'^ *File "([^"]+)", line (\d+), in (.+)\n(?: +(.+))?', re.MULTILINE)
_NOT_OURS = re.compile(r"site-packages|dist-packages|/lib/python3|^<")


def is_failed_start(window: Window, first: Failure) -> bool:
    """Return whether the program ended by itself, an exception or a code, before any step."""
    has_begun = window.steps.num_steps + window.steps.dropped_steps > 0
    return (
        not has_begun
        and is_before_training(window, first)
        and (first.error is None or first.error.where != "fatal_signal")
        and (first.ended is None or first.ended.reason == "exit_code")
    )


def as_failed_start(window: Window, crash: CrashCause, starts: Sequence[Failure]) -> CrashCause:
    """Return the cause of an end as that of a start that failed; `starts` may have begun it."""
    first = crash.failures[0]
    alike = {one.rank: one for one in reversed(starts) if one.signature == first.signature}
    ranks = tuple(sorted(alike))
    is_everyones = (
        len(ranks) > 1
        and set(crash.echoes) <= set(ranks)
        and all(one.rank in alike for one in starts)
        and set(window.hosts(ranks)) == set(window.hosts(sorted(window.ranks)))
    )
    reason, is_clear = _reason(window, first)
    stopped = tuple(rank for rank in crash.torn_down if rank not in alike)
    if is_everyones:
        why = f"{capital(ranks_text(ranks))} {_did(first)}, all alike"
        crash = replace(
            crash, failures=tuple(alike[rank] for rank in ranks), ranks=(), echoes=(),
            torn_down=stopped, why=why + _stopped(stopped),
        )  # fmt: skip
    elif stopped and len(alike) + len(stopped) == window.world_size:
        crash = replace(crash, why=f"{capital(ranks_text(ranks))} {_did(first)}{_stopped(stopped)}")
    who = "The program" if is_everyones else window.who([one.rank for one in crash.failures])
    sure = 0.9 if is_clear and (is_everyones or not first.is_weak) else crash.confidence
    return replace(
        crash,
        kind="failed_start",
        confidence=sure,
        reason="it says so itself" if is_clear else "no line says clearly why it left",
        what=f"{who} ended before {'any' if is_everyones else 'its first'} step: {reason}",
        why=crash.why + _place(first),
        next=_next(window, first, is_clear=is_clear, is_everyones=is_everyones),
    )


def _reason(window: Window, first: Failure) -> tuple[str, bool]:
    """Return what the program says of its end, and whether that is a reason."""
    if first.error is not None:
        if first.error.message:
            return cut(first.text, _MOST_TEXT), True
        code = _frame(first)[3]
        return first.text + (f" in `{cut(code, _MOST_TEXT)}`" if code else ""), bool(code)
    if first.line:
        return cut(first.line, _MOST_TEXT).rstrip("."), True
    code = f"it {first.text.split(' without')[0]}"
    said = last_line(window, first)
    if said:
        return f"{code}; its last line: {cut(said, _MOST_TEXT)}", False
    return f"{code}, and wrote nothing that says why", False


def _next(window: Window, first: Failure, *, is_clear: bool, is_everyones: bool) -> str:
    if not is_clear:
        return "Read its last lines of output, under Logs, then start it again"
    if first.entry is not None or first.error is not None or not is_everyones:
        return crash_next(window, first)
    return "Do what the line says, then start it again: no rank and no host is at fault"


def _stopped(ranks: Sequence[int]) -> str:
    """Return that ranks were ended before they could fail or not, behind a semicolon."""
    return f"; {ranks_text(ranks)} did not get so far: stopped by their launcher" if ranks else ""


def _did(first: Failure) -> str:
    return "raised it" if first.error is not None else first.text.split(" without")[0]


def _place(first: Failure) -> str:
    """Return where in the user's own code an exception was raised, behind a semicolon."""
    path, line, function, _ = _frame(first)
    return f"; at {path.rpartition('/')[2]}:{line}, in {function}" if path else ""


def _frame(first: Failure) -> tuple[str, str, str, str]:
    """Return file, line, function and text of the innermost frame outside of libraries."""
    found = _FRAME.findall(first.error.traceback) if first.error is not None else []
    own = [frame for frame in found if not _NOT_OURS.search(frame[0])]
    return own[-1] if own else ("", "", "", "")
