"""What changed in single ranks when the whole job became slower: a lead where no rank is to blame.

Ranks that share processors slow each other, so that all of them are slower and none stands out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import Evidence
from rankscope_server.findings.statistics import median
from rankscope_server.findings.text import capital, ms_text, percent_text, ranks_text

if TYPE_CHECKING:
    from rankscope_server.diagnose.regression.detector import Slowdown

_STEPS = 200  # on each side of the change that are compared
_SHOWN = 4  # ranks in the evidence


@dataclass(frozen=True, slots=True)
class Lead:
    """What changed with it, and where to look therefore."""

    evidence: tuple[Evidence, ...] = ()
    next: str = ""
    command: str = ""


def lead_of(window: Window, change: Slowdown) -> Lead:
    """Return which ranks' other threads, or lack of a processor, are most of the rise."""
    more_ms = (change.after_ms - change.before_ms) * window.policy.min_explained_share
    busy = _busier(window, change.step, more_ms)
    held = _held(window, change, more_ms)
    evidence = [
        Evidence(
            f"Other threads of rank {rank} take {ms_text(after)} of processor time a step since "
            f"then, {ms_text(before)} before", window.link(rank, change.step)
        )
        for rank, (before, after) in list(busy.items())[:_SHOWN]
    ]  # fmt: skip
    evidence += [
        Evidence(
            f"Rank {rank} was ready to run and had no processor for {percent_text(after)} of the "
            f"time since then, {percent_text(before)} before"
        )
        for rank, (before, after) in list(held.items())[:_SHOWN]
    ]
    if busy:
        known = window.ranks.get(next(iter(busy)))
        return Lead(
            tuple(evidence),
            f"Look first at what the other threads of {ranks_text(sorted(busy))} do since step "
            f"{change.step:,}: they take the processor, or Python's interpreter lock",
            f"py-spy dump --pid {known.pid}" if known and known.pid else "",
        )
    if held:
        hosts = window.hosts(tuple(held))
        return Lead(
            tuple(evidence),
            f"{capital(ranks_text(sorted(held)))} had no processor: see what else runs on "
            f"{', '.join(hosts) or 'their hosts'} since step {change.step:,}",
            "ps -eo pid,psr,ni,pcpu,comm --sort=-pcpu | head -20",
        )
    return Lead()


def _busier(window: Window, step: int, more_ms: float) -> dict[int, tuple[float, float]]:
    """Return ranks whose other threads take so much more a step: ms of CPU before and after.

    The rank with the largest rise first. What is not known is left out.
    """
    table = window.steps
    usual = np.flatnonzero(~table.special() & table.seen())
    turn = int(np.searchsorted(table.steps[usual], step))
    sides = usual[max(0, turn - _STEPS) : turn], usual[turn:][-_STEPS:]
    if not all(map(len, sides)):
        return {}
    before, after = (
        median(table.get("process_cpu")[:, side] - table.get("cpu")[:, side], 1) for side in sides
    )
    rows = {rank: (max(float(before[row]), 0.0), float(after[row]))
            for rank, row in table.row_of.items()}  # fmt: skip
    found = {rank: pair for rank, pair in rows.items() if pair[1] - pair[0] >= more_ms}
    return dict(sorted(found.items(), key=lambda one: one[1][0] - one[1][1]))


def _held(window: Window, change: Slowdown, more_ms: float) -> dict[int, tuple[float, float]]:
    """Return ranks that wait so much more for a processor: share of the time before and after."""
    steps = window.steps.steps
    first_ms, last_ms = window.time_ms(int(steps[0])), window.time_ms(int(steps[-1]))
    turn_ms = window.time_ms(change.step)
    if first_ms is None or turn_ms is None or last_ms is None:
        return {}
    found = {}
    for rank in window.steps.row_of:
        before = window.samples.run_delay_ratio(rank, first_ms * 1e6, turn_ms * 1e6)
        after = window.samples.run_delay_ratio(rank, turn_ms * 1e6, last_ms * 1e6)
        if before is None or after is None:
            continue
        if after * change.after_ms - before * change.before_ms >= more_ms:
            found[rank] = (before, after)
    return found
