"""Ranks that went on, or ended well, without collectives that the others wait in.

A script that swallows an exception goes on to later steps, or to its end, and leaves out what the
others call: nothing that it called differs, it called less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import Evidence, Finding
from rankscope_server.findings.text import capital, confidence_word, place_text, ranks_text

_STEPS_AHEAD = 2  # one more than ranks of a synchronous job can be apart


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
    """Return one finding for each rank that went on without its group."""
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
    who = capital(place_text(ranks, window.hosts(ranks)))
    went = "ended, with exit code 0," if gone.has_ended else f"is in step {gone.step:,}"
    confidence = 0.85
    return Finding(
        key=f"{window.attempt}/desync/left/{gone.group}/{gone.rank}",
        detector="desync",
        kind="desync",
        severity="critical",
        attempt=window.attempt,
        ranks=ranks,
        hosts=window.hosts(ranks),
        group=gone.group,
        onset_step=gone.others_step or None,
        onset_ms=window.time_ms(gone.others_step),
        confidence=confidence,
        confidence_text=f"{confidence_word(confidence)}: each rank counts its own calls, and this "
        "one went on",
        what=f"{who} {went} without collectives that the others entered in step "
        f"{gone.others_step:,}",
        why=f"Its last call in group {gone.group} is #{gone.issued:,}; "
        f"{ranks_text(gone.others)} entered {gone.operation} #{gone.issued + 1:,} or later ones "
        f"and could not end them. Rank {gone.rank} had gone on to step {gone.step:,}",
        next=f"Find what lets rank {gone.rank} leave a step early: an exception that is caught, a "
        "`continue`, fewer batches than the others; all ranks must call alike",
        evidence=(Evidence(f"Rank {gone.rank}, step {gone.step:,}", window.link(gone.rank)),),
        ruled_out=("A rank that is slow: it went on to later steps, or ended well",),
        would_be_wrong_if=f"Rank {gone.rank} is meant to take no part from this step on",
        policy_hash=window.policy.hash,
        victims=gone.others,
    )
