"""Clocks of hosts and of processes that are apart, with a band that holds."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from rankscope.wire.formulas import MEDIAN_SCATTER, SIGMA_PER_MAD
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import DetectorResult, Finding, ran, skipped
from rankscope_server.findings.statistics import Array
from rankscope_server.findings.text import capital, ms_text, ranks_text

_MAX_SHOWN = 16
_LEAST_OF_A_PART = 6
_UNKNOWN = (0.0, float("inf"))
_PARTS = 5  # stretches of the operations kept in which a drift must show


class ClockOffsets:
    """Finds hosts whose clock is ahead of or behind the others, by collectives and the server."""

    name: ClassVar[str] = "clock"

    def look(self, window: Window) -> DetectorResult:
        """Return one finding for each host whose clock is surely apart from most others."""
        hosts = {known.host for known in window.ranks.values() if known.host}
        if not hosts:
            return skipped(self, "the hosts of the ranks are not known", "attach the agent")
        odd = odd_ranks(window)
        if len(hosts) < 2:
            checked = () if odd else ("clock: all ranks share one clock",)
            return ran(self, odd, checked)
        against = window.clocks.against_all()
        if not against and not odd:
            return skipped(
                self,
                "no collective that joins hosts has ended yet",
                "wait; a barrier over all ranks would show it",
            )
        policy = window.policy
        apart = {
            host: found
            for host, found in against.items()
            if abs(found[0]) - found[1] > policy.clock_report_ms
        }
        worst = sorted(apart, key=lambda host: (-abs(apart[host][0]), host))[:_MAX_SHOWN]
        findings = [_finding(window, host, *apart[host], len(hosts)) for host in worst]
        widest = max((band for _, band in against.values()), default=0.0)
        found = [*odd, *findings]
        checked = (
            f"clock: {len(against)} hosts agree within {ms_text(policy.clock_report_ms)}, as far "
            f"as {ms_text(widest)} can show",
        )
        return ran(self, found, () if found else checked)


def _finding(window: Window, host: str, ahead_ms: float, band_ms: float, num_hosts: int) -> Finding:
    is_pair = num_hosts == 2
    others = sorted({known.host for known in window.ranks.values()} - {host})
    against = others[0] if is_pair else "most hosts"
    side = "ahead of" if ahead_ms > 0 else "behind"
    size = ms_text(abs(ahead_ms))
    was_set = host in window.clocks.stepped
    ranks = [rank for rank, known in window.ranks.items() if known.host == host]
    finding = window.finding(
        "clock_offset",
        f"clock_offset/{host}",
        severity="warning" if abs(ahead_ms) >= window.policy.clock_warn_ms else "info",
        hosts=(host,),
        confidence=confidence_of(is_pair),
        what=f"The clock of {host} runs {size} (±{ms_text(band_ms)}) {side} {against}",
        why=f"{capital(ranks_text(ranks))} of {host} begin and end collectives "
        f"{size} {'later' if ahead_ms > 0 else 'earlier'} by their own clock than the others "
        "could have" + (", and did not some time ago: the clock was set" * was_set),
        next="Check the time service of the host",
        command="chronyc tracking || timedatectl timesync-status",
        evidence=(
            f"Events on {host} and another host closer than {ms_text(band_ms)} have no order",
        ),
        ruled_out=("A late host: lateness widens the band, it moves no bound",),
        disproof="A collective ended on a rank before another had begun it",
    )
    return replace(finding, cost_throughput_ratio=0.0)  # a wrong clock costs nothing


def odd_ranks(window: Window) -> list[Finding]:
    """Return the findings on ranks whose clock is not that of the others of their host."""
    found = []
    for host, table in sorted(window.rank_clocks.items()):
        names = {rank: str(rank) for rank in sorted(window.ranks) if window.host(rank) == host}
        against = table.clocks(names, 0.0).against_all()
        leads_ms, count = table.leads_ms(names), 0
        for name in names.values():
            drift_ms, now = _drift(leads_ms[name])
            # The bounds of a clock that drifts contradict each other; its newest lead does not.
            offset = against.get(name, _UNKNOWN) if drift_ms is None else now
            if abs(offset[0]) - offset[1] > window.policy.clock_report_ms and count < _MAX_SHOWN:
                count += 1
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


def confidence_of(is_pair: bool) -> tuple[float, str]:
    """Return how sure a difference of clocks is, and why; of two clocks either may be wrong."""
    if is_pair:
        return 0.6, "the difference is certain, but not which of the two clocks is wrong"
    return 0.95, "no rank ends a collective before all have begun it, which bounds the difference"


def _rank_finding(
    window: Window, host: str, rank: int, offset: tuple[float, float], drift_ms: float | None,
    is_pair: bool,
) -> Finding:  # fmt: skip
    """Return the finding on a process whose clock is not that of the others of its host."""
    ahead_ms, band_ms = offset
    side = "ahead of" if ahead_ms > 0 else "behind"
    size = ms_text(abs(ahead_ms))
    more = "" if drift_ms is None else f", and {ms_text(abs(drift_ms))} more with each stretch seen"
    finding = window.finding(
        "clock_offset" if drift_ms is None else "clock_drift",
        f"clock_offset/{host}/{rank}",
        severity="warning",  # one machine has one clock: nothing drifts there by itself
        ranks=(rank,),
        hosts=(host,),
        confidence=confidence_of(is_pair),
        what=f"The clock of rank {rank} runs {size} (±{ms_text(band_ms)}) {side} those of the "
        f"other ranks on {host}{more}",
        why=f"Ranks of one machine read one clock; rank {rank} begins and ends collectives "
        f"{size} {'later' if ahead_ms > 0 else 'earlier'} by its own than the others could have",
        next="See what changes the time of that process: a preloaded library such as libfaketime, "
        "a time namespace, a virtual machine of its own under the same host name",
        command="tr '\\0' '\\n' < /proc/PID/environ | grep -E 'LD_PRELOAD|FAKETIME'",
        evidence=(f"Times of rank {rank} in logs and tables are off by so much",),
        ruled_out=("A late rank: lateness widens the band, it moves no bound",),
        disproof="A collective ended on a rank before another had begun it",
    )
    return replace(finding, cost_throughput_ratio=0.0)  # a wrong clock costs nothing
