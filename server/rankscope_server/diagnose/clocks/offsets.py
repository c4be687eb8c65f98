"""Clocks of hosts that are apart, with a band that holds."""

from __future__ import annotations

from typing import ClassVar

from rankscope_server.diagnose.clocks.rank_clock import odd_ranks
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import DetectorResult, DetectorStatus, Evidence, Finding
from rankscope_server.findings.text import capital, confidence_word, ms_text, ranks_text

_MAX_TOLD = 16


class ClockOffsets:
    """Finds hosts whose clock is ahead of or behind the others, by collectives and the server."""

    name: ClassVar[str] = "clock"
    kinds: ClassVar[tuple[str, ...]] = ("clock_offset", "clock_drift")
    needs: ClassVar[frozenset[str]] = frozenset({"collectives"})

    def look(self, window: Window) -> DetectorResult:
        """Return one finding for each host whose clock is surely apart from most others."""
        status = DetectorStatus(self.name, str(self.__doc__), "ran")
        hosts = {known.host for known in window.ranks.values() if known.host}
        if not hosts:
            return self._skipped("the hosts of the ranks are not known", "attach the agent")
        odd = odd_ranks(window)
        if len(hosts) < 2:
            checked = () if odd else ("clock: all ranks share one clock",)
            return DetectorResult(status, tuple(odd), checked)
        against = window.clocks.against_all()
        if not against and not odd:
            return self._skipped(
                "no collective that joins hosts has ended yet",
                "wait; a barrier over all ranks would tell",
            )
        policy = window.policy
        apart = {
            host: found
            for host, found in against.items()
            if abs(found[0]) - found[1] > policy.clock_tell_ms
        }
        worst = sorted(apart, key=lambda host: (-abs(apart[host][0]), host))[:_MAX_TOLD]
        findings = [_finding(window, host, *apart[host], len(hosts)) for host in worst]
        widest = max((band for _, band in against.values()), default=0.0)
        return DetectorResult(
            status,
            (*odd, *findings),
            () if odd or findings else (
                f"clock: {len(against)} hosts agree within {ms_text(policy.clock_tell_ms)}, as far "
                f"as {ms_text(widest)} can tell",
            ),
        )  # fmt: skip

    def _skipped(self, reason: str, remedy: str) -> DetectorResult:
        return DetectorResult(
            DetectorStatus(self.name, str(self.__doc__), "skipped", reason, remedy)
        )


def _finding(window: Window, host: str, ahead_ms: float, band_ms: float, num_hosts: int) -> Finding:
    is_pair = num_hosts == 2
    others = sorted({known.host for known in window.ranks.values()} - {host})
    against = others[0] if is_pair else "most hosts"
    side = "ahead of" if ahead_ms > 0 else "behind"
    size = ms_text(abs(ahead_ms))
    was_set = host in window.clocks.stepped
    confidence = 0.6 if is_pair else 0.95
    reasons = (
        "the difference is certain, but two clocks do not tell which of them is wrong"
        if is_pair
        else "nobody ends a collective before all have begun it, which bounds the difference"
    )
    ranks = [rank for rank, known in window.ranks.items() if known.host == host]
    return Finding(
        key=f"{window.attempt}/clock/clock_offset/{host}",
        detector="clock",
        kind="clock_offset",
        severity="warning" if abs(ahead_ms) >= window.policy.clock_warn_ms else "info",
        attempt=window.attempt,
        hosts=(host,),
        cost_throughput_ratio=0.0,
        confidence=confidence,
        confidence_text=f"{confidence_word(confidence)}: {reasons}",
        what=f"The clock of {host} runs {size} (±{ms_text(band_ms)}) {side} {against}",
        why=(
            f"{capital(ranks_text(ranks))} of {host} begin and end collectives "
            f"{size} {'later' if ahead_ms > 0 else 'earlier'} by their own clock than the others "
            "could have" + (", and did not some time ago: the clock was set" * was_set)
        ),
        next="Check the time service of the host",
        next_command="chronyc tracking || timedatectl timesync-status",
        evidence=(
            Evidence(f"Events on {host} and another host closer than {ms_text(band_ms)} have no "
                     "order"),
        ),
        ruled_out=("A host that is merely late: lateness widens the band, it moves no bound",),
        would_be_wrong_if="A collective ended on a rank before another had begun it",
        policy_hash=window.policy.hash,
    )  # fmt: skip
