"""Which machines are at their limit: busy processors, and tasks that wait for what is short."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import sqlalchemy as sa

from rankscope_server.api.machines.samples import Reader, missed, rates
from rankscope_server.findings.text import percent_text
from rankscope_server.text import plural

NEWEST_MINUTES = 5


@dataclass(frozen=True, slots=True)
class _Limit:
    """A counter of time by whose rate a machine is at a limit."""

    kind: str
    column: str
    is_idle: bool  # it counts what is left
    least: float  # share of the time from which on it is said
    text: str


_WAITING = "tasks wait for a processor {} of the time"
_LIMITS = (
    _Limit("host", "cpu_idle_us_total", True, 0.95, "its processors are {} busy"),
    _Limit("pressure", "cpu_some_us_total", False, 0.5, _WAITING),
    _Limit("pressure", "memory_some_us_total", False, 0.1, "for memory {} of the time"),
    _Limit("pressure", "io_full_us_total", False, 0.3, "all wait for a disk {} of the time"),
)  # fmt: skip


def saturation_text(connection: sa.Connection, run_id: str, end_ns: int) -> str:
    """Return which machine is furthest at its limits in the newest minutes; empty where none is."""
    between = (end_ns - NEWEST_MINUTES * 60 * 10**9, end_ns)
    found: dict[str, list[str]] = defaultdict(list)
    for kind in dict.fromkeys(limit.kind for limit in _LIMITS):
        limits = [limit for limit in _LIMITS if limit.kind == kind]
        reader = Reader(connection, run_id, kind, [], between)
        for (host, _), columns in reader.read([limit.column for limit in limits]):
            gaps = missed(columns["time_ns"], columns["interval_ns"])
            for limit in limits:
                values = columns[limit.column].astype(np.float64)
                values[values < 0] = np.nan
                spent = rates(columns["time_ns"], values, gaps) * 1e-6
                spent = spent[~np.isnan(spent)]
                if not len(spent):
                    continue
                share = float(np.median(1.0 - spent if limit.is_idle else spent))
                if share >= limit.least:
                    found[host].append(limit.text.format(percent_text(min(share, 1.0))))
    if not found:
        return ""
    worst = max(found, key=lambda host: len(found[host]))
    text = f"{worst}: {', '.join(found[worst])}, in the newest {NEWEST_MINUTES} minutes"
    others = len(found) - 1
    return f"{text}; {plural(others, 'other machine')} at a limit" if others else text
