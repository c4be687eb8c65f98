"""A limit on processor time that holds a rank up, as containers have one: what the kernel counts.

A control group that has used up its time of a period, a tenth of a second as a rule, is not let run
until the next one begins.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope_server.diagnose.window import Window
from rankscope_server.findings.text import percent_text

CPU_LIMIT = "cpu_limit"  # the kind of finding


def throttled(window: Window, row: int, columns: NDArray[Any]) -> tuple[float, float, float]:
    """Return for which share of these steps a row's group was not let run, and begin and end, ns.

    0 where that is not known.
    """
    rank = window.steps.ranks[row]
    if not window.samples.is_throttled(rank):  # the usual case
        return 0.0, 0.0, 0.0
    started = window.steps.get("started_ms")[row, columns]
    known = started[~np.isnan(started)]
    if not len(known):
        return 0.0, 0.0, 0.0
    begin, end = float(known.min()) * 1e6, float(known.max()) * 1e6
    return window.samples.throttled_ratio(rank, begin, end) or 0.0, begin, end


def limit_of(window: Window, row: int, columns: NDArray[Any], lost_ms: float) -> str:
    """Return what a limit does in these steps, in words; empty where `lost_ms` is mostly not it."""
    share, begin, end = throttled(window, row, columns)
    if not share or share * (end - begin) / 1e6 < window.policy.min_explained_share * lost_ms:
        return ""
    return limit_text(window, window.steps.ranks[row], begin, end, share)


def limit_text(window: Window, rank: int, begin: float, end: float, share: float) -> str:
    """Return what a limit on processor time does to a rank, in words."""
    cores = window.samples.cpu_limit_cores(rank, begin, end)
    of = f" of {cores:g} processors" if cores is not None else ""
    return (
        f"its control group was not let run for {percent_text(share)} of the time, as its "
        f"limit{of} was used up"
    )


def limit_next(window: Window, rank: int) -> str:
    """Return what to do about it."""
    host = window.host(rank)
    return (
        f"Raise the processor limit of the container of rank {rank}{f' on {host}' if host else ''} "
        "(resources.limits.cpu, --cpus, CPUQuota) or take it off; fewer threads and loader workers "
        "need less of it"
    )
