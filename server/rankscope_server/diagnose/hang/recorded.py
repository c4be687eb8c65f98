"""What the hang detector says differently of a recording: its processes are gone."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rankscope_server.diagnose.hang.wait_graph import activity_ns
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.text import ranks_text, seconds_text

_S = 1_000_000_000


def next_of(window: Window, roots: Sequence[int]) -> str:
    """Return what to do about ranks that hung, once the job is over."""
    their = "their" if len(roots) > 1 else "its"
    hosts = window.hosts(tuple(roots))
    checked = ", ".join(hosts[:4]) if hosts else f"{their} host{'s' * (len(roots) > 1)}"
    return (
        f"Look at what stopped {ranks_text(roots)}{_at(window, roots)}: {their} logs, and the "
        "kernel log for Xid and ECC errors; run rankscope preflight on "
        f"{checked} before the next start"
    )


def ruled_out(window: Window, roots: Sequence[int], idle_seconds: Sequence[float]) -> list[str]:
    """Return what the dumps of the ranks at fault exclude."""
    if not all(root in window.states for root in roots):
        return []
    out = [f"A process that had ended: {ranks_text(roots)} wrote {_dumps(roots)}"]
    if idle_seconds:
        which = "them" if len(roots) > 1 else "it"
        out.insert(
            0, f"A slow rank: no call of {which} began in the {seconds_text(min(idle_seconds))} "
            "before",
        )  # fmt: skip
    return out


def wrong_if(roots: Sequence[int]) -> str:
    """Return what would disprove that ranks hung."""
    who = "one of them" if len(roots) > 1 else "it"
    return f"A log shows that {who} went on after the dumps were written: then it was slow"


def time_note(seconds: float) -> str:
    """Return how the time that ranks waited is known."""
    return (
        "Dumps do not say when they were written: not before the oldest open operation had run "
        f"into its time-out, {seconds_text(seconds)} after the last sign"
    )


def _at(window: Window, roots: Sequence[int]) -> str:
    times = [activity_ns(window.states[root]) for root in roots if root in window.states]
    known = [time_ns for time_ns in times if time_ns > 0]
    if not known:
        return ""
    return f" at {datetime.fromtimestamp(max(known) // _S, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _dumps(roots: Sequence[int]) -> str:
    return "their dumps" if len(roots) > 1 else "its dump"
