"""Rank-hours by week, from what each run cost. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankscope_server.api.fleet.schema import FleetProject, FleetWeek
from rankscope_server.verdict.cost import PARTS

LOST = frozenset({"straggling", "bubble", "waiting", "restart", "lost work", "stuck or failing"})
OTHER = frozenset({"start-up", "first steps", "checkpoint", "after the end"})
UNKNOWN = frozenset({"unknown"})
PRODUCTIVE = "productive"
KEPT = frozenset(PARTS) - LOST - OTHER - UNKNOWN
_HOUR_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Use:
    """For how long it is known how busy machines were, and for how long of it they were; us."""

    known_us: int = 0
    busy_us: int = 0


@dataclass(frozen=True, slots=True)
class Spent:
    """When a run began, and what it cost as its analysis stored it; None: not known."""

    started_ns: int
    cost: Mapping[str, Any] | None
    project: str = ""
    is_live: bool = False
    gpu: Use = Use()
    cpu: Use = Use()


def monday_of(ns: int) -> dt.datetime:
    """Return the begin of the week, Monday 0:00 UTC, in which a moment is."""
    day = dt.datetime.fromtimestamp(ns // 10**9, dt.UTC)
    midnight = day.replace(hour=0, minute=0, second=0, microsecond=0)
    return midnight - dt.timedelta(days=day.weekday())


def by_week(runs: Iterable[Spent], now_ns: int, num_weeks: int) -> list[FleetWeek]:
    """Return the last weeks, the oldest first, also those without runs."""
    last = monday_of(now_ns)
    begins = [last - dt.timedelta(weeks=back) for back in range(num_weeks - 1, -1, -1)]
    weeks: dict[dt.datetime, list[Spent]] = {begin: [] for begin in begins}
    for run in runs:
        week = weeks.get(monday_of(run.started_ns))
        if week is not None:
            week.append(run)
    return [
        FleetWeek(
            begin_ms=begin.timestamp() * 1e3, is_over=begin < last, projects=_by_project(found),
            **_hours(found),
        )
        for begin, found in weeks.items()
    ]  # fmt: skip


def _by_project(runs: Sequence[Spent]) -> list[FleetProject]:
    projects: dict[str, list[Spent]] = {}
    for run in runs:
        projects.setdefault(run.project, []).append(run)
    found = [FleetProject(project=name, **_hours(some)) for name, some in projects.items()]
    return sorted(found, key=lambda one: (-one.rank_hours, one.project))


def _hours(runs: Sequence[Spent]) -> dict[str, Any]:
    """Return the fields of `FleetHours`."""
    parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    for run in runs:
        for name, seconds in (run.cost["parts"] if run.cost is not None else {}).items():
            parts[name] = parts.get(name, 0.0) + seconds / _HOUR_SECONDS

    def total(names: frozenset[str]) -> float:
        return sum(parts[name] for name in sorted(names))

    return {
        "num_runs": len(runs),
        "num_unknown": sum(run.cost is None for run in runs),
        "num_live": sum(run.is_live for run in runs),
        "rank_hours": total(frozenset(PARTS)),
        "productive_rank_hours": parts[PRODUCTIVE],
        "kept_rank_hours": total(KEPT),
        "lost_rank_hours": total(LOST),
        "other_rank_hours": total(OTHER),
        "unknown_rank_hours": total(UNKNOWN),
        "lost_by_cause": {name: parts[name] for name in PARTS if name in LOST},
        "gpu_utilization_ratio": _ratio([run.gpu for run in runs]),
        "num_gpu_known": sum(run.gpu.known_us > 0 for run in runs),
        "cpu_utilization_ratio": _ratio([run.cpu for run in runs]),
        "num_cpu_known": sum(run.cpu.known_us > 0 for run in runs),
    }


def _ratio(uses: Sequence[Use]) -> float | None:
    known = sum(use.known_us for use in uses)
    return sum(use.busy_us for use in uses) / known if known else None
