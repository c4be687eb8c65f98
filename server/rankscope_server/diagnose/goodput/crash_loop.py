"""Attempts in a row that failed alike: the job starts again and dies of the same once more."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from rankscope_server.diagnose.goodput.ledger import Ledger
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import Evidence, Finding
from rankscope_server.findings.severity import severity_of_cost
from rankscope_server.findings.text import percent_text

LOOP = "crash-loop"  # name of its finding, by which its key ends
_KINDS = ("crash", "failed_start", "hang")


@dataclass(frozen=True, slots=True)
class CrashLoop:
    """How attempts in a row failed."""

    failures: tuple[Finding, ...]  # one for each attempt, newest first
    ranks: tuple[int, ...]  # that all of them name
    host: str  # of other ranks each time, hardly by chance; empty where it shows none
    num_steps: int  # the most that one of them did


def loop_of(window: Window) -> CrashLoop | None:
    """Return the newest attempts in a row that failed alike, None where fewer than two did.

    Over is what an attempt got past: one that did not fail and did more steps than any of those.
    """
    own = _failure_of(window)
    attempts = [window] * (own is not None) + list(reversed(window.past))
    failures: list[Finding] = []
    for attempt in attempts:
        failure = _failure_of(attempt)
        if failure is None:
            break
        failures.append(failure)
    alike = max(_by_error(failures), _by_rank(window, failures), key=len)
    if len(alike) < window.policy.loop_attempts:
        return None
    most = max(_num_steps(attempt) for attempt in attempts[: len(alike)])
    if own is None and _num_steps(window) > most:
        return None
    ranks = _common(alike)
    host = "" if ranks else _host_of(window, alike)
    return CrashLoop(tuple(alike), ranks, host, most)


def _host_of(window: Window, failures: Sequence[Finding]) -> str:
    """Return the one host of ranks that failed in turn; empty where it may be so by chance.

    Of n failures that each fall on any of the hosts all fall on that of the first by the chance of
    hosts ** (1 - n).
    """
    shared = set.intersection(*(set(one.hosts) for one in failures))
    num_hosts = len({known.host for known in window.ranks.values()})
    chance = float(max(num_hosts, 1)) ** (1 - len(failures))
    is_sure = 1.0 - chance >= window.policy.sure_confidence
    return next(iter(shared)) if len(shared) == 1 and is_sure else ""


def _failure_of(window: Window) -> Finding | None:
    """Return what ended an attempt; None where it did not fail, or only echoes were seen.

    A hang that was one before a rank failed, else what failed.
    """
    found = [
        finding
        for finding in window.before.values()
        if finding.kind in _KINDS and finding.severity == "critical" and finding.state == "open"
    ]
    patience_ms = window.policy.hang_floor_seconds * 1e3
    return min(
        found,
        key=lambda one: (one.onset_ms or 0.0) + patience_ms * (one.kind == "hang"),
        default=None,
    )


def _num_steps(window: Window) -> int:
    return window.steps.num_steps + window.steps.dropped_steps


def _by_error(failures: Sequence[Finding]) -> list[Finding]:
    """Return the newest that ended by the same error; a hang says no more than where it is."""
    if not failures or failures[0].kind == "hang":
        return []
    return _while(failures, lambda one: _error_text(one) == _error_text(failures[0]))


def _by_rank(window: Window, failures: Sequence[Finding]) -> list[Finding]:
    """Return the newest that name the same rank, and few others beside it."""
    few = max(1, int(window.world_size * window.policy.rare_ratio))
    alike = _while(failures, lambda one: 0 < len(one.ranks) <= few)
    while alike and not _common(alike):
        alike.pop()
    return alike


def _while(failures: Sequence[Finding], is_so: Callable[[Finding], bool]) -> list[Finding]:
    return list(takewhile(is_so, failures))


def _common(failures: Sequence[Finding]) -> tuple[int, ...]:
    return tuple(sorted(set.intersection(*(set(one.ranks) for one in failures))))


def _error_text(finding: Finding) -> str:
    """Return what happened without ranks, hosts and numbers."""
    _, is_known, text = finding.what.partition(" raised ")
    return re.sub(r"\d+", "#", text if is_known else finding.what)


def loop_finding(window: Window, loop: CrashLoop, ledger: Ledger | None) -> Finding:
    """Return the finding on attempts that failed alike; its cost is the ledger's."""
    cost = None if ledger is None else ledger.share("restart") + ledger.share("lost work")
    newest, count = loop.failures[0], len(loop.failures)
    is_costly = cost is not None and severity_of_cost(cost, window.policy) == "critical"
    first, last = loop.failures[-1].attempt, newest.attempt
    between = "and" if last == first + 1 else "to"
    same = "rank" if loop.ranks else "error of one host" if loop.host else "error"
    took = "" if cost is None else (
        f"; restarts and steps done again took {percent_text(cost)} of the ranks' time"
    )  # fmt: skip
    return window.finding(
        "crash_loop",
        LOOP,
        severity="critical" if is_costly else "warning",
        ranks=loop.ranks,
        hosts=(loop.host,) if loop.host else None,
        cost=cost,
        what=f"{count} attempts in a row failed alike: {newest.what[0].lower()}{newest.what[1:]}",
        why=f"Attempts {first} {between} {last} ended so, after {loop.num_steps:,} steps at most, "
        f"and none got further since{took}"
        + f"; each time another rank of {loop.host} failed first"
        * bool(loop.host),
        next=f"Do not start it once more before this is mended: {newest.next}",
        command=newest.next_command,
        confidence=(0.9, f"it is the same {same} each time"),
        evidence=[
            Evidence(f"Attempt {one.attempt}: {one.what}", f"runs/{window.run_id}/errors")
            for one in loop.failures[:4]
        ],
        disproof=f"This attempt does more than {loop.num_steps:,} steps",
    )
