"""Ranks of one role that work unequally long, of which no reference says that a rank is slow."""

from __future__ import annotations

from typing import ClassVar

from rankscope_server.diagnose.balance.unequal import unequal_findings
from rankscope_server.diagnose.shared.comparison import as_devices_report, lack_of, roles_of
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import DetectorResult, ran, skipped
from rankscope_server.observe.deviation import deviation_of

# That run before it: they say of a rank that it is slow, and why.
_NAME_THEM = frozenset({"straggler", "stalls", "stopped-process"})


class Balance:
    """Finds ranks of a role that work unequally long since their first steps."""

    name: ClassVar[str] = "balance"
    finds: ClassVar[str] = (
        "Ranks that have been slower than others of their role since their first steps, by how "
        "steadily they are: also most of a role, and by less than a straggler is"
    )
    needs: ClassVar[str] = "50 steps of two or more ranks of one role, 200 where they differ little"
    silent: ClassVar[str] = (
        "the job loses less than 2 %; the others do not wait for these ranks; less than a quarter "
        "of a role is quicker; a finding names them; after less than two minutes little is info"
    )

    def look(self, window: Window) -> DetectorResult:
        """Return what the job loses as its ranks work unequally long."""
        window = as_devices_report(window)
        lack = lack_of(window)
        if lack is not None:
            return skipped(self, *lack)
        deviation = deviation_of(window.steps, roles_of(window), window.policy)
        findings, unknown = unequal_findings(window, deviation, _named(window))
        return ran(self, findings, not_known=unknown)


def _named(window: Window) -> set[int]:
    """Return the ranks that a finding of this look calls slow."""
    return {
        rank
        for finding in window.before.values()
        if finding.attempt == window.attempt
        and finding.detector in _NAME_THEM
        and finding.state == "open"
        and finding.severity != "info"
        for rank in finding.ranks
    }
