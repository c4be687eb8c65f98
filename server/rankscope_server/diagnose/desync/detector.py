"""Desync: ranks of a group that call different collectives, also where no error says so."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from rankscope_server.diagnose.desync.left_early import left_early
from rankscope_server.diagnose.desync.words import desync_finding, splits_finding
from rankscope_server.diagnose.shared.call_differences import differences
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import NOT_HERE, DetectorResult, DetectorStatus, Finding
from rankscope_server.findings.text import capital, ranks_text


class Desync:
    """Finds ranks that skip, add, swap or mismatch a collective, by what each of them called."""

    name: ClassVar[str] = "desync"
    kinds: ClassVar[tuple[str, ...]] = ("desync",)
    needs: ClassVar[frozenset[str]] = frozenset({"collectives", "group"})

    def look(self, window: Window) -> DetectorResult:
        """Return the first difference of every group in which calls differ."""
        if window.world_size == 1:
            return self._skipped("one rank has nobody to differ from", NOT_HERE)
        unmatched = [rank for rank, state in window.states.items() if not state.is_recording]
        if unmatched:
            return self._skipped(
                f"{capital(ranks_text(unmatched))} cannot be compared with the others: switched "
                "off, or switched on alone",
                "switch recording on in all ranks at once, or restart the run",
            )
        if not window.calls.num_taken and window.facts.is_recording:
            return self._skipped("it does not number the calls of a group", NOT_HERE)
        if not window.calls.num_taken:
            return self._skipped(
                "no collective has been recorded yet", "wait, or see the agent page: sources"
            )
        findings = [desync_finding(window, difference) for difference in differences(window)]
        findings += [
            splits_finding(window, group, *uneven)
            for group, track in window.calls.tracks.items()
            if (uneven := track.uneven_splits()) is not None
        ]
        if not findings:
            findings = left_early(window)
        findings = _with_memory(window, findings)
        compared = sum(len(track.agreed) for track in window.calls.tracks.values())
        return DetectorResult(
            DetectorStatus(self.name, str(self.__doc__), "ran"),
            tuple(findings),
            () if findings else (f"desync: the last {compared:,} collectives were called alike",),
        )

    def _skipped(self, reason: str, remedy: str) -> DetectorResult:
        return DetectorResult(
            DetectorStatus(self.name, str(self.__doc__), "skipped", reason, remedy)
        )


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
