"""Desync: ranks of a group that call different collectives, also where no error says so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from rankscope_server.diagnose.desync.words import desync_finding, splits_finding
from rankscope_server.diagnose.shared.call_differences import differences
from rankscope_server.diagnose.shared.comparison import unmatched
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import (
    NOT_HERE,
    DetectorResult,
    Evidence,
    Finding,
    ran,
    skipped,
)
from rankscope_server.findings.text import ranks_text

_STEPS_AHEAD = 2  # one more than ranks of a synchronous job can be apart


class Desync:
    """Finds ranks that skip, add, swap or mismatch a collective, by what each of them called."""

    name: ClassVar[str] = "desync"
    finds: ClassVar[str] = (
        "Ranks that skip, add, swap or mismatch a collective, or leave their group behind, by what "
        "each of them called"
    )
    needs: ClassVar[str] = "collectives of two or more ranks"
    silent: ClassVar[str] = (
        "records of some calls are lost; ranks are late by less than a chunk takes; every step of "
        "the run differs alike: info"
    )

    def look(self, window: Window) -> DetectorResult:
        """Return the first difference of every group in which calls differ."""
        if window.world_size == 1:
            return skipped(self, "one rank has no peer to differ from", NOT_HERE)
        if (lack := unmatched(window)) is not None:
            return skipped(self, *lack)
        if not window.calls.num_taken and window.facts.is_recording:
            return skipped(self, "it does not number the calls of a group", NOT_HERE)
        if not window.calls.num_taken:
            return skipped(
                self, "no collective has been recorded yet", "wait, or see the agent page: sources"
            )
        findings = [desync_finding(window, difference) for difference in differences(window)]
        findings += [
            splits_finding(window, group, *uneven)
            for group, track in window.calls.tracks.items()
            if (uneven := track.exchanges.uneven(track.num_members)) is not None
        ]
        if not findings:
            findings = left_early(window)
        findings = _with_memory(window, findings)
        compared = sum(track.num_agreed for track in window.calls.tracks.values())
        checked = f"desync: the last {compared:,} collectives were called alike"
        return ran(self, findings, () if findings else (checked,))


def _with_memory(window: Window, findings: list[Finding]) -> list[Finding]:
    """Keep what was found first: after one skipped call every later number differs, too.

    Calls that are in order again are over, but what they computed stays wrong: the finding stays
    as recovered.
    """
    now = {finding.key: finding for finding in findings}
    for key, old in window.before.items():
        if old.detector != Desync.name:
            continue
        if key in now:
            is_same = old.confidence >= now[key].confidence or old.what == now[key].what
            now[key] = replace(old, state="open") if is_same else now[key]
        else:
            ended = max((state.step for state in window.states.values()), default=None)
            now[key] = replace(old, state="recovered", ended_step=old.ended_step or ended)
    return list(now.values())


@dataclass(frozen=True, slots=True)
class Gone:
    """A rank that called less than the others of its group and does not wait for them."""

    rank: int
    group: str
    issued: int  # its last collective
    step: int
    others: tuple[int, ...]  # who called the next one
    others_step: int
    operation: str
    has_ended: bool


def left_early(window: Window) -> list[Finding]:
    """Return one finding for each rank that went on, or ended well, without its group.

    A script that swallows an exception goes on to later steps, or to its end, and leaves out what
    the others call: nothing that it called differs, it called less.
    """
    found: dict[int, Gone] = {}
    for gone in _gone(window):
        known = found.get(gone.rank)
        if known is None or gone.step < known.step:
            found[gone.rank] = gone
    # What most ranks of a job left out is not for a few of them to have kept.
    if 2 * len(found) > len(window.states):
        return []
    return [_finding(window, found[rank]) for rank in sorted(found)]


def _gone(window: Window) -> Iterator[Gone]:
    issued: dict[str, dict[int, int]] = {}
    for rank, state in window.states.items():
        for group in state.groups:
            if group.issued:
                issued.setdefault(group.group, {})[rank] = group.issued
    for name, counts in issued.items():
        most = max(counts.values())
        ahead = tuple(sorted(rank for rank, count in counts.items() if count == most))
        if len(counts) < 2 or not _are_stuck(window, name, ahead):
            continue
        others_step = max(window.states[rank].step for rank in ahead)
        for rank, count in counts.items():
            if window.groups.get((rank, name)) != window.groups.get((ahead[0], name)):
                continue
            end, step = window.ended.get(rank), window.states[rank].step
            has_ended = end is not None and end.reason == "clean"
            if count < most and (has_ended or step >= others_step + _STEPS_AHEAD):
                operation = next(
                    g.operation for g in window.states[ahead[0]].groups if g.group == name
                )
                yield Gone(rank, name, count, step, ahead, others_step, operation, has_ended)


def _are_stuck(window: Window, name: str, ranks: tuple[int, ...]) -> bool:
    """Return whether those that called most wait in it, or did not survive it."""
    for rank in ranks:
        end = window.ended.get(rank)
        if end is not None and end.reason != "clean":
            return True
        standing = next((g for g in window.states[rank].groups if g.group == name), None)
        if end is None and standing is not None and standing.open_sequence:
            return True
    return False


def _finding(window: Window, gone: Gone) -> Finding:
    ranks = (gone.rank,)
    who = window.who(ranks)
    went = "ended, with exit code 0," if gone.has_ended else f"is in step {gone.step:,}"
    confidence = 0.85
    return window.finding(
        "desync",
        f"left/{gone.group}/{gone.rank}",
        severity="critical",
        ranks=ranks,
        group=gone.group,
        onset_step=gone.others_step or None,
        onset_ms=window.time_ms(gone.others_step),
        confidence=(confidence, "each rank counts its own calls, and this one went on"),
        what=f"{who} {went} without collectives that the others entered in step "
        f"{gone.others_step:,}",
        why=f"Its last call in group {gone.group} is #{gone.issued:,}; "
        f"{ranks_text(gone.others)} entered {gone.operation} #{gone.issued + 1:,} or later ones "
        f"and could not end them. Rank {gone.rank} had gone on to step {gone.step:,}",
        next=f"Find what lets rank {gone.rank} leave a step early: an exception that is caught, a "
        "`continue`, fewer batches than the others; all ranks must call alike",
        evidence=(Evidence(f"Rank {gone.rank}, step {gone.step:,}", window.link(gone.rank)),),
        ruled_out=("A rank that is slow: it went on to later steps, or ended well",),
        disproof=f"Rank {gone.rank} is meant to take no part from this step on",
        victims=gone.others,
    )
