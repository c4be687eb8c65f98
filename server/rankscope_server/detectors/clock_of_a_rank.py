"""Processes whose clock is not that of the others on their machine (detection.md D17)."""

from __future__ import annotations

from itertools import pairwise

from rankscope_server.detectors.finding import Evidence, Finding
from rankscope_server.detectors.window import Window
from rankscope_server.detectors.words import confidence_word, ms_text

_MAX_TOLD = 16
_PARTS = 5  # stretches of the operations kept in which a drift must show


def odd_ranks(window: Window) -> list[Finding]:
    """Return the findings on ranks whose clock is not that of the others of their host."""
    found = []
    names = {rank: str(rank) for rank in window.ranks}
    for host, table in sorted(window.rank_clocks.items()):
        against = table.clocks(names, 0.0).against_all()
        apart = {
            int(name): offset
            for name, offset in against.items()
            if abs(offset[0]) - offset[1] > window.policy.clock_tell_ms
        }
        past = [clocks.against_all() for clocks in table.history(names, _PARTS)] if apart else []
        for rank, offset in sorted(apart.items())[:_MAX_TOLD]:
            drift_ms = _drift_ms(past, str(rank))
            found.append(_rank_finding(window, host, rank, offset, drift_ms, len(against) == 2))
    return found


def _drift_ms(past: list[dict[str, tuple[float, float]]], name: str) -> float | None:
    """Return by how much a clock's offset changes from stretch to stretch, None unless it does.

    A clock that was set changes once; one that drifts in nearly every stretch, and one way.
    """
    known = [stretch[name] for stretch in past if name in stretch]
    if len(known) < _PARTS - 1:
        return None
    changes = [
        later[0] - earlier[0]
        for earlier, later in pairwise(known)
        if abs(later[0] - earlier[0]) > earlier[1] + later[1]
    ]
    is_steady = len(changes) >= _PARTS - 2 and len({change > 0 for change in changes}) == 1
    return sum(changes) / len(changes) if is_steady else None


def _rank_finding(
    window: Window, host: str, rank: int, offset: tuple[float, float], drift_ms: float | None,
    is_pair: bool,
) -> Finding:  # fmt: skip
    """Return the finding on a process whose clock is not that of the others of its host."""
    ahead_ms, band_ms = offset
    side = "ahead of" if ahead_ms > 0 else "behind"
    size = ms_text(abs(ahead_ms))
    more = "" if drift_ms is None else f", and {ms_text(abs(drift_ms))} more with each stretch seen"
    confidence = 0.6 if is_pair else 0.95
    return Finding(
        key=f"{window.attempt}/clock/clock_offset/{host}/{rank}",
        detector="clock",
        kind="clock_offset" if drift_ms is None else "clock_drift",
        severity="warning",  # one machine has one clock: nothing drifts there by itself
        attempt=window.attempt,
        ranks=(rank,),
        hosts=(host,),
        cost_throughput_ratio=0.0,
        confidence=confidence,
        confidence_text=f"{confidence_word(confidence)}: "
        + (
            "the difference is certain, but two clocks do not tell which of them is wrong"
            if is_pair
            else "nobody ends a collective before all have begun it, which bounds the difference"
        ),
        what=f"The clock of rank {rank} runs {size} (±{ms_text(band_ms)}) {side} those of the "
        f"other ranks on {host}{more}",
        why=f"Ranks of one machine read one clock; rank {rank} begins and ends collectives "
        f"{size} {'later' if ahead_ms > 0 else 'earlier'} by its own than the others could have",
        next="See what changes the time of that process: a preloaded library such as libfaketime, "
        "a time namespace, a virtual machine of its own under the same host name",
        next_command="tr '\\0' '\\n' < /proc/PID/environ | grep -E 'LD_PRELOAD|FAKETIME'",
        evidence=(Evidence(f"Times of rank {rank} in logs and tables are off by so much"),),
        ruled_out=("A rank that is merely late: lateness widens the band, it moves no bound",),
        would_be_wrong_if="A collective ended on a rank before another had begun it",
        policy_hash=window.policy.hash,
    )
