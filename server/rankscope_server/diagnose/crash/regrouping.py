"""Ranks that a job lost and trained on without: no crash of the job, and the rank is named."""

from __future__ import annotations

from typing import ClassVar

from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import (
    NOT_HERE,
    DetectorResult,
    Evidence,
    Finding,
    ran,
    skipped,
)
from rankscope_server.findings.text import capital, ranks_text
from rankscope_server.observe.failures import Failure, of_end
from rankscope_server.observe.regroups import Regroup


class Regrouping:
    """Finds ranks that a job lost and trains on without, and places that were taken again."""

    name: ClassVar[str] = "regrouping"
    finds: ClassVar[str] = "Ranks that a job lost and trains on without"
    needs: ClassVar[str] = "`rankscope.regrouped(...)` of a program that makes its groups anew"
    silent: ClassVar[str] = "every group had the ranks of the one before"

    def look(self, window: Window) -> DetectorResult:
        """Return one finding for each rank that was ever lost."""
        groups = window.facts.regroups.in_order
        if not groups:
            return skipped(self, "the job does not regroup", NOT_HERE)
        lost: dict[int, Regroup] = {}
        back: dict[int, Regroup] = {}
        present = set(groups[0].ranks)
        for group in groups[1:]:
            members = set(group.ranks)
            for rank in present - members:
                lost[rank] = group
                back.pop(rank, None)
            back |= {rank: group for rank in members & lost.keys() - present}
            present = members
        findings = [_finding(window, rank, lost[rank], back.get(rank)) for rank in sorted(lost)]
        checked = f"groups: {len(groups):,} in all, none without a rank of the one before"
        return ran(self, findings, () if findings else (checked,))


def is_survived(window: Window, failure: Failure) -> bool:
    """Return whether the others train on without a rank that failed, or may be about to."""
    regroups = window.facts.regroups
    if regroups.are_without(failure.rank):
        return True
    groups = regroups.in_order
    is_alone = not groups or window.ended.keys() >= set(groups[-1].ranks)
    age_seconds = (window.now_ns - failure.time_ns) / 1e9
    return not is_alone and age_seconds < window.policy.regroup_seconds


def _finding(window: Window, rank: int, lost: Regroup, back: Regroup | None) -> Finding:
    others = ranks_text(lost.ranks)
    then = "trained on without it"
    if back is not None:
        then += f", until a process took its place in step {back.step:,}"
    link = window.link(rank, lost.step or None)
    return window.finding(
        "lost_rank",
        rank,
        severity="warning" if back is None else "info",
        ranks=(rank,),
        onset_step=lost.step or None,
        onset_ms=lost.time_ns / 1e6,
        cost=1 / max(window.world_size, 1) if back is None else None,
        confidence=(0.95, "the members of the group said who is in it"),
        what=f"{window.who((rank,))} was lost in step {lost.step:,}; {others} {then}",
        why=_why(window, rank, back),
        next="Nothing to do"
        if back is not None
        else "Look why it ended, and start another process in its place",
        evidence=(
            Evidence(f"Group {lost.epoch:,}: {others}, without rank {rank}", link),
            *([] if back is None else [Evidence(f"Group {back.epoch:,}: with rank {rank}")]),
        ),
        disproof="The program itself sent the rank away",
    )


def _why(window: Window, rank: int, back: Regroup | None) -> str:
    ended = window.ended.get(rank)
    failure = None if ended is None else of_end(ended, window.errors)
    if back is not None:
        return "A process is this rank again; how the one before ended is in the list of ranks"
    if failure is not None:
        return capital(f"it {'was ' * failure.text.startswith('killed')}{failure.text}")
    if ended is not None:
        return "Its process left in order"
    return "Its process has not ended: it was too late for the others, or stopped"
