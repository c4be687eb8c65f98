"""Rank-hours by week, from what each run cost. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rankscope_server.api.fleet.schema import FleetWeek
from rankscope_server.verdict.cost import PARTS

LOST = frozenset({"straggling", "bubble", "waiting", "restart", "lost work", "stuck or failing"})
OTHER = frozenset({"start-up", "first steps", "checkpoint", "after the end"})
UNKNOWN = frozenset({"unknown"})
KEPT = frozenset(PARTS) - LOST - OTHER - UNKNOWN
_HOUR_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Spent:
    """When a run began, and what it cost as its analysis stored it; None: not known."""

    started_ns: int
    cost: Mapping[str, Any] | None


def monday_of(ns: int) -> dt.datetime:
    """Return the begin of the week, Monday 0:00 UTC, in which a moment is."""
    day = dt.datetime.fromtimestamp(ns // 10**9, dt.UTC)
    midnight = day.replace(hour=0, minute=0, second=0, microsecond=0)
    return midnight - dt.timedelta(days=day.weekday())


def by_week(runs: Iterable[Spent], now_ns: int, num_weeks: int) -> list[FleetWeek]:
    """Return the last weeks, the oldest first, also those without runs."""
    last = monday_of(now_ns)
    begins = [last - dt.timedelta(weeks=back) for back in range(num_weeks - 1, -1, -1)]
    sums: dict[dt.datetime, dict[str, float]] = {begin: {} for begin in begins}
    for run in runs:
        week = sums.get(monday_of(run.started_ns))
        if week is None:
            continue
        _add(week, "runs", 1.0)
        if run.cost is None:
            _add(week, "unknown runs", 1.0)
            continue
        for name, seconds in run.cost["parts"].items():
            _add(week, name, seconds / _HOUR_SECONDS)
    return [_answer(begin, week) for begin, week in sums.items()]


def _add(week: dict[str, float], name: str, amount: float) -> None:
    week[name] = week.get(name, 0.0) + amount


def _answer(begin: dt.datetime, week: Mapping[str, float]) -> FleetWeek:
    def hours(names: frozenset[str]) -> float:
        return sum(week.get(name, 0.0) for name in sorted(names))

    return FleetWeek(
        begin_ms=begin.timestamp() * 1e3,
        num_runs=int(week.get("runs", 0)),
        num_unknown=int(week.get("unknown runs", 0)),
        rank_hours=hours(frozenset(PARTS)),
        kept_rank_hours=hours(KEPT),
        lost_rank_hours=hours(LOST),
        other_rank_hours=hours(OTHER),
        unknown_rank_hours=hours(UNKNOWN),
    )
