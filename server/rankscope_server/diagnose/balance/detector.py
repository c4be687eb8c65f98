"""Ranks of one role that work unequally long, of which no reference says that a rank is slow."""

from __future__ import annotations

from typing import ClassVar

from rankscope_server.diagnose.balance.unequal import unequal_findings
from rankscope_server.diagnose.balance.uneven import uneven_work
from rankscope_server.diagnose.shared.comparison import as_devices_report, lack_of, roles_of
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import DetectorResult, Finding, ran, skipped
from rankscope_server.observe.deviation import deviation_of

# That run before it: they say of a rank that it is slow, and why.
_NAME_THEM = frozenset({"straggler", "stalls", "stopped-process"})


class Balance:
    """Finds ranks that have always been slower than others, and work uneven from step to step."""

    name: ClassVar[str] = "balance"
    finds: ClassVar[str] = (
        "Ranks that have been slower than others of their role since their first steps, by how "
        "steadily they are: also most of a role, and by less than a straggler is; steps in which "
        "all wait for one rank, each time another"
    )
    needs: ClassVar[str] = (
        "50 steps of two or more ranks of one role, 200 where they differ little; 100 for uneven "
        "work"
    )
    silent: ClassVar[str] = (
        "the job loses less than 2 %, by uneven work less than 10 %, which the headline says from "
        "2 % on; the others do not wait for these ranks; less than a quarter of a role is quicker; "
        "another finding names them; what is little is info in the first two minutes"
    )

    def look(self, window: Window) -> DetectorResult:
        """Return what the job loses as its ranks work unequally long."""
        window = as_devices_report(window)
        lack = lack_of(window)
        if lack is not None:
            return skipped(self, *lack)
        deviation = deviation_of(window.steps, roles_of(window), window.policy)
        slow = [finding for finding in window.before.values() if _is_slow(window, finding)]
        surely = {rank for one in slow if one.severity != "info" for rank in one.ranks}
        unequal, unknown = unequal_findings(window, deviation, surely)
        named = {rank for finding in (*slow, *unequal) for rank in finding.ranks}
        uneven, also_lost = uneven_work(window, deviation, named)
        return ran(self, [*unequal, *uneven], not_known=unknown, also_lost=also_lost)


def _is_slow(window: Window, finding: Finding) -> bool:
    """Return whether a finding of this look calls ranks slow now."""
    is_now = finding.attempt == window.attempt and finding.state == "open"
    return is_now and finding.detector in _NAME_THEM
