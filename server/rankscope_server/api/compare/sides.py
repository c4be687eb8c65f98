"""Reads one side of a comparison: its steps, facts, findings and work."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope.wire.schema import IMPORTED
from rankscope_server.answers import LeftOut, json_object
from rankscope_server.api.compare.drift import Facts
from rankscope_server.api.compare.parts import Series, series_of
from rankscope_server.api.findings import queries as finding_queries
from rankscope_server.api.findings.schema import ShownFinding
from rankscope_server.api.runs.environment import environment
from rankscope_server.api.runs.queries import RANK_HEAD, rank_rows, role_of
from rankscope_server.api.runs.schema import EnvironmentAnswer
from rankscope_server.api.steps.queries import (
    missing_plane,
    steps_of_many,
    waiting_planes,
    warm_up_steps,
)
from rankscope_server.api.steps.series import metrics
from rankscope_server.findings.statistics import Array
from rankscope_server.ingest.step_metrics import BLOCKED_METRICS, PHASE_METRICS
from rankscope_server.problems import not_found
from rankscope_server.store import tables
from rankscope_server.store.tiles import read_blocks

MAX_STEPS = 5_000
WORK = ("tokens", "samples")
_METRICS = ("step", "blocked", "num_collectives", *PHASE_METRICS, *BLOCKED_METRICS)
_ALL_POINTS = 4_096


@dataclass(frozen=True, slots=True)
class Asked:
    """Which part of a run one side is; None: the newest attempt, its usual steps."""

    attempt: int | None = None
    lo: int | None = None
    hi: int | None = None


@dataclass(frozen=True, slots=True)
class Side:
    """One side, as it was read."""

    run: sa.Row[Any]
    attempt: int
    attempts: list[int]
    first: int  # and last step of the attempt, 0 where there is none
    last: int
    lo: int
    hi: int
    world_size: int
    hosts: list[str]
    series: Series
    own_ms: Array  # self time, ranks x steps, NaN where it is not known
    work: Mapping[str, float]  # of a rank in a step, by name
    facts: Facts
    num_with_facts: int  # ranks that sent facts
    findings: list[ShownFinding]
    onset: int | None
    left_out: list[LeftOut]

    @property
    def is_imported(self) -> bool:
        """Return whether another tool recorded it."""
        return bool(self.run.launcher == IMPORTED)

    @property
    def is_live(self) -> bool:
        """Return whether more steps may come."""
        return self.run.status not in ("ended", "failed")


def read_side(connection: sa.Connection, run: sa.Row[Any], asked: Asked) -> Side:
    """Return one side. Raises Problem 404 for an attempt that is not there."""
    spans = _spans(connection, run.run_id)
    attempt = run.attempt if asked.attempt is None else asked.attempt
    if attempt not in spans and asked.attempt is not None:
        raise not_found(
            f"no attempt {attempt} in run {run.run_id}", f"it has {sorted(spans)}", "attempt"
        )
    first, last, world_size = spans.get(attempt, (0, 0, 0))
    onset = _onset(run) if attempt == run.attempt else None
    lo, hi = _range(asked, first, last, onset)
    rows = rank_rows(connection, run.run_id, attempt, RANK_HEAD)
    stages = {row.rank: role_of(row) for row in rows}
    world_size = max(len(rows), world_size)
    most = min(MAX_STEPS, steps_of_many(world_size, stages))
    left_out = []
    if hi - lo + 1 > most:
        what = f"earlier steps of {run.run_id}: one answer compares the newest {most:,}"
        left_out.append(LeftOut(what=what, count=hi - lo + 1 - most))
        lo = hi - most + 1
    env = environment(connection, run.run_id, attempt, 0)
    series, own_ms = _series(connection, run.run_id, attempt, lo, hi, stages)
    return Side(
        run=run,
        attempt=attempt,
        attempts=sorted(spans),
        first=first,
        last=last,
        lo=lo,
        hi=hi,
        world_size=world_size,
        hosts=sorted({row.host for row in rows} - {""}),
        series=series,
        own_ms=own_ms,
        work=_work(connection, run.run_id, lo, hi),
        facts=_facts(env),
        num_with_facts=len(env.ranks),
        findings=_findings(connection, run, attempt, lo, hi),
        onset=onset,
        left_out=left_out,
    )


def _spans(connection: sa.Connection, run_id: str) -> dict[int, tuple[int, int, int]]:
    """Return the first and last step of each attempt, 0 where it has none yet, and its ranks."""
    table = tables.attempt
    rows = connection.execute(sa.select(table).where(table.c.run_id == run_id))
    return {row.attempt: (row.step_lo or 0, row.step_hi or 0, row.world_size or 0) for row in rows}


def _onset(run: sa.Row[Any]) -> int | None:
    """Return since when what the verdict names holds; a note does not divide a run."""
    body = json_object(run.verdict) or {}
    onset = body.get("onset_step")
    return onset if body.get("severity") in ("warning", "critical") else None


def _range(asked: Asked, first: int, last: int, onset: int | None) -> tuple[int, int]:
    """Return the steps to compare: those asked for, else all after the warm-up and the onset.

    As on the other pages, healthy steps must not soften what is wrong now.
    """
    if asked.lo is not None or asked.hi is not None:
        lo = max(first, asked.lo or 0)
        return lo, max(lo - 1, min(last, last if asked.hi is None else asked.hi))
    if last < 1:
        return 1, 0
    lo = first + warm_up_steps(last - first + 1)
    return (onset if onset is not None and lo < onset <= last else lo), last


def _series(
    connection: sa.Connection, run_id: str, attempt: int, lo: int, hi: int, stages: dict[int, int]
) -> tuple[Series, Array]:
    """Return the series of some steps, read block by block, and the self time of each rank."""
    width = max(hi - lo + 1, 0)
    empty = series_of({name: missing_plane(name, 0, width) for name in _METRICS}, ())
    found = {name: np.full(width, np.nan) for name in empty}
    own_ms = np.full((1 + max(stages, default=-1), width), np.nan, np.float32)
    for start, planes in (
        read_blocks(connection, run_id, _METRICS, lo, hi, attempt) if width else ()
    ):
        roles = [stages.get(rank, -1) for rank in range(len(planes["step"]))]
        at = slice(start - lo, start - lo + planes["step"].shape[1])
        for name, values in series_of(waiting_planes(planes), roles).items():
            found[name][at] = values
        known = min(len(own_ms), len(planes["step"]))
        own_ms[:known, at] = (planes["step"] - planes["blocked"])[:known]
    return found, own_ms


def _work(connection: sa.Connection, run_id: str, lo: int, hi: int) -> dict[str, float]:
    """Return the median work of a rank in a step of these, by name."""
    found = {}
    for one in metrics(connection, run_id, list(WORK), _ALL_POINTS, merged=True).series:
        inside = [
            value
            for step, value in zip(one.step, one.value, strict=True)
            if value is not None and lo <= step <= hi
        ]
        if inside and one.name in WORK:
            found[one.name] = float(np.median(inside))
    return found


def _facts(env: EnvironmentAnswer) -> dict[str, frozenset[str]]:
    facts = {one.fact: frozenset([one.value]) for one in env.common}
    facts |= {one.fact: frozenset(value.value for value in one.values) for one in env.differences}
    return facts


def _findings(
    connection: sa.Connection, run: sa.Row[Any], attempt: int, lo: int, hi: int
) -> list[ShownFinding]:
    """Return the findings that hold in these steps, the dearest first."""
    every = finding_queries.findings(connection, run)
    return [
        one
        for one in (*every.open, *every.recovered)
        if one.attempt == attempt
        and (one.onset_step is None or one.onset_step <= hi)
        and (one.ended_step is None or one.ended_step >= lo)
    ]


def command_of(side: Side) -> list[str]:
    """Return the command line of a run."""
    words: list[str] = json.loads(side.run.command)
    return words
