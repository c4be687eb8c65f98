"""Processes whose clock is not that of the others on their machine."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.wire.formulas import MEDIAN_SCATTER, SIGMA_PER_MAD
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import Evidence, Finding
from rankscope_server.findings.text import confidence_word, ms_text

Array = NDArray[Any]
_MAX_TOLD = 16
_LEAST_OF_A_PART = 6
_UNKNOWN = (0.0, float("inf"))
_PARTS = 5  # stretches of the operations kept in which a drift must show


def odd_ranks(window: Window) -> list[Finding]:
    """Return the findings on ranks whose clock is not that of the others of their host."""
    found = []
    for host, table in sorted(window.rank_clocks.items()):
        names = {rank: str(rank) for rank in sorted(window.ranks) if window.host(rank) == host}
        against = table.clocks(names, 0.0).against_all()
        leads_ms, told = table.leads_ms(names), 0
        for name in names.values():
            drift_ms, now = _drift(leads_ms[name])
            # The bounds of a clock that drifts contradict each other; its newest lead does not.
            offset = against.get(name, _UNKNOWN) if drift_ms is None else now
            if abs(offset[0]) - offset[1] > window.policy.clock_tell_ms and told < _MAX_TOLD:
                told += 1
                found.append(
                    _rank_finding(window, host, int(name), offset, drift_ms, len(names) == 2)
                )
    return found


def _drift(lead_ms: Array) -> tuple[float | None, tuple[float, float]]:
    """Return by how much a clock's lead changes from stretch to stretch, None unless it does.

    And the lead of the last stretch with its band.

    A clock that was set changes once; one that drifts in nearly every stretch, and one way. A
    change counts beyond four standard errors of the medians of both stretches.
    """
    if len(lead_ms) < _PARTS * _LEAST_OF_A_PART:
        return None, (0.0, 0.0)
    parts = np.array_split(lead_ms, _PARTS)
    middle = np.array([np.median(part) for part in parts])
    error = np.array([
        SIGMA_PER_MAD * MEDIAN_SCATTER * np.median(np.abs(part - np.median(part)))
        / np.sqrt(len(part)) for part in parts
    ])  # fmt: skip
    changes = np.diff(middle)
    clear = changes[np.abs(changes) > 4 * np.hypot(error[1:], error[:-1])]
    if len(clear) < _PARTS - 2 or not (np.all(clear > 0) or np.all(clear < 0)):
        return None, (0.0, 0.0)
    return float(np.median(clear)), (float(middle[-1]), 4 * float(error[-1]))


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
