"""Clocks of hosts and of processes that are apart, with a band that holds."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import DetectorResult, Finding, ran, skipped
from rankscope_server.findings.text import capital, ms_text, ranks_text

_MAX_SHOWN = 16
_UNKNOWN = (0.0, float("inf"))


class ClockOffsets:
    """Finds hosts whose clock is ahead of or behind the others, by collectives and the server."""

    name: ClassVar[str] = "clock"
    finds: ClassVar[str] = (
        "Hosts whose clock is ahead of or behind the others, processes whose clock is not that of "
        "their machine, and by how much at most"
    )
    needs: ClassVar[str] = "collectives that join hosts or ranks, exchanges with the server"
    silent: ClassVar[str] = "the band of error reaches over zero"

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
        num_hosts = len(hosts | against.keys())  # a collector may come before its ranks
        findings = [_finding(window, host, *apart[host], num_hosts) for host in worst]
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
    # of a host without ranks, its collector's exchanges of times with the server say it
    why = f"What {host} and the server sent each other shows it"
    if ranks:
        late = "later" if ahead_ms > 0 else "earlier"
        why = (
            f"{capital(ranks_text(ranks))} of {host} begin and end collectives {size} {late} by "
            "their own clock than the others could have"
        )
    finding = window.finding(
        "clock_offset",
        f"clock_offset/{host}",
        severity="warning" if abs(ahead_ms) >= window.policy.clock_warn_ms else "info",
        hosts=(host,),
        confidence=confidence_of(is_pair),
        what=f"The clock of {host} runs {size} (±{ms_text(band_ms)}) {side} {against}",
        why=why + ", and did not some time ago: the clock was set" * was_set,
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
    names_of: dict[str, dict[int, str]] = {}
    for rank in sorted(window.ranks):
        names_of.setdefault(window.host(rank), {})[rank] = str(rank)
    for host, table in sorted(window.rank_clocks.items()):
        names, count = names_of.get(host, {}), 0
        table.num_tables = len(window.rank_clocks)
        against, drifts = table.clocks(names, 0.0).against_all(), table.drifts(names)
        for name in names.values():
            drift = drifts[name]
            # The bounds of a clock that drifts contradict each other; its newest lead does not.
            drifting = drift.lead_ms, drift.band_ms
            offset = against.get(name, _UNKNOWN) if drift.change_ms is None else drifting
            if abs(offset[0]) - offset[1] > window.policy.clock_report_ms and count < _MAX_SHOWN:
                count += 1
                found.append(
                    _rank_finding(window, host, int(name), offset, drift.change_ms, len(names) == 2)
                )
    return found


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
