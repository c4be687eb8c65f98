"""Ranks that go on with the others and no longer update their weights.

A step ends with the optimizer. A rank that calls the same collectives as its group while its step
does not end leaves its updates out: its copy of the weights stays behind, checked or not.
"""

from __future__ import annotations

from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import Evidence, Finding
from rankscope_server.findings.statistics import median
from rankscope_server.findings.text import capital, confidence_word, place_text

_STEPS_BEHIND = 10  # of an unfinished step that gathers gradients over some backward passes


def skipped_updates(window: Window) -> list[Finding]:
    """Return one finding for each rank whose steps do not end though its collectives go on."""
    states = window.states
    if len(states) < window.policy.min_role_size:
        return []
    newest = max(state.step for state in states.values())
    behind = [rank for rank, state in states.items() if newest - state.step > _STEPS_BEHIND]
    level = [rank for rank in states if rank not in behind]
    if not behind or 2 * len(behind) >= len(states):
        return []
    return [
        _finding(window, rank, newest)
        for rank in sorted(behind)
        if any(_goes_along(window, rank, other) for other in level)
    ]


def _goes_along(window: Window, rank: int, other: int) -> bool:
    """Return whether two ranks of one role made as many calls in a group of theirs."""
    mine, theirs = window.ranks.get(rank), window.ranks.get(other)
    if mine is None or theirs is None or (mine.role, mine.stage) != (theirs.role, theirs.stage):
        return False
    issued = {group.group: group.issued for group in window.states[other].groups}
    per_step = _calls_per_step(window, other)
    return any(
        group.issued and abs(group.issued - issued.get(group.group, 0)) <= max(2.0, 2 * per_step)
        and issued.get(group.group, 0) > _STEPS_BEHIND * per_step
        for group in window.states[rank].groups
    )  # fmt: skip


def _calls_per_step(window: Window, rank: int) -> float:
    state = window.states[rank]
    most = max((group.issued for group in state.groups), default=0)
    return most / max(state.step, 1)


def _finding(window: Window, rank: int, newest: int) -> Finding:
    since = window.states[rank].step
    who = capital(place_text((rank,), window.hosts((rank,))))
    confidence = 0.85
    usual = median(window.steps.get("duration"), 1) if window.steps.num_steps else None
    pace = "" if usual is None or not len(usual) else f", {newest - since:,} steps by now"
    return Finding(
        key=f"{window.attempt}/replicas/updates/{rank}",
        detector="replicas",
        kind="replica_drift",
        severity="critical",
        attempt=window.attempt,
        ranks=(rank,),
        hosts=window.hosts((rank,)),
        onset_step=since,
        onset_ms=window.time_ms(since),
        confidence=confidence,
        confidence_text=f"{confidence_word(confidence)}: its collectives are counted, and no "
        "optimizer step",
        what=f"{who} has not updated its weights since step {since:,}; the others are in step "
        f"{newest:,}",
        why=f"It calls the collectives that the others call{pace}, and its optimizer takes no "
        "step: its weights stay as they were while it adds its gradients to theirs",
        next=f"Find the condition under which rank {rank} leaves optimizer.step() out; restart it "
        "from a checkpoint of another replica",
        evidence=(Evidence(f"Rank {rank}, its last step", window.link(rank, since)),),
        ruled_out=("A rank that hangs: it calls what the others call",),
        would_be_wrong_if=f"Rank {rank} has no optimizer by design, or calls rankscope.step() "
        "more rarely",
        policy_hash=window.policy.hash,
    )
