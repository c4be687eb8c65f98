"""Which picture belongs to which kind of finding, and its charts from the store."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from rankscope_server.answers import json_object
from rankscope_server.api.pictures.machines import links, samples
from rankscope_server.api.pictures.numbers import (
    LOCAL_NORM,
    LOSS,
    NORM,
    PRINTED,
    memory,
    numbers,
)
from rankscope_server.api.pictures.schema import FindingPicture
from rankscope_server.api.pictures.steps import clocks, pace
from rankscope_server.api.pictures.subject import MAX_LINES, Maker, Subject
from rankscope_server.api.runs.queries import RANK_HEAD, rank_rows
from rankscope_server.problems import not_found
from rankscope_server.store import tables

MAKERS: dict[str, tuple[Maker, ...]] = {
    "memory_growth": (memory,),
    "fragmentation": (memory,),
    "nan": (numbers(LOSS, LOCAL_NORM, NORM),),
    "loss_spike": (numbers(LOSS, NORM),),
    "divergence": (numbers(LOSS, PRINTED, NORM),),
    "corruption": (numbers(LOCAL_NORM, LOSS),),
    "corrupt_batch": (numbers(LOSS, LOCAL_NORM),),
    "clock_offset": (clocks,),
    "clock_drift": (clocks,),
    "slow_link": (links, pace),
    "low_bus_bandwidth": (pace,),
    "communication_bound": (pace,),
    "slowdown": (pace,),
    **dict.fromkeys(
        ("thermal_or_power", "throttle", "power_cap", "gpu_outlier"),
        (samples("gpu_clock", "gpu_temperature", "gpu_power"),),
    ),
    "gpu_underuse": (samples("gpu_utilization"),),
    **dict.fromkeys(
        ("host_contention", "cpu_limit", "cpu_pinning"),
        (samples("rank_processors", "node_processors"),),
    ),
}
_NO_NUMBERS = "no number of training of these steps is stored"
_NO_SAMPLES = "no sample of the machines around its onset is stored"
LACKING: dict[str, str] = {
    **dict.fromkeys(("memory_growth", "fragmentation", "nan", "loss_spike", "divergence",
                     "corruption", "corrupt_batch"), _NO_NUMBERS),
    **dict.fromkeys(("thermal_or_power", "throttle", "power_cap", "gpu_outlier", "gpu_underuse",
                     "host_contention", "cpu_limit", "cpu_pinning"), _NO_SAMPLES),
    **dict.fromkeys(("slow_link", "low_bus_bandwidth", "communication_bound", "slowdown"),
                    "no step around its onset is stored"),
    **dict.fromkeys(("clock_offset", "clock_drift"),
                    "no measurement of clocks and no step of other ranks is stored"),
}  # fmt: skip


def picture(connection: sa.Connection, run: sa.Row[Any], finding_id: int) -> FindingPicture:
    """Return the charts of a finding. Raises Problem 404."""
    table = tables.finding.c
    row = connection.execute(
        sa.select(table.key, table.body, table.attempt)
        .where(table.run_id == run.run_id, table.id == finding_id)
    ).first()  # fmt: skip
    if row is None:
        raise not_found(
            f"no finding {finding_id} in run {run.run_id}",
            f"see /api/v1/runs/{run.run_id}/findings", "id",
        )  # fmt: skip
    body = json_object(row.body)
    ranks = rank_rows(connection, run.run_id, row.attempt, RANK_HEAD)
    onset_ms = body.get("onset_ms")
    subject = Subject(
        run_id=run.run_id,
        attempt=row.attempt,
        kind=body["kind"],
        name=row.key.split("/", 2)[-1],
        ranks=tuple(body.get("ranks", ())[:MAX_LINES]),
        hosts=tuple(body.get("hosts", ())[:MAX_LINES]),
        onset_step=body.get("onset_step"),
        onset_ns=None if onset_ms is None else int(onset_ms * 1e6),
        last_step=run.step,
        last_ns=max(run.last_seen_ns, run.ended_ns or 0),
        host_of={rank.rank: rank.host for rank in ranks},
    )
    makers = MAKERS.get(subject.kind, ())
    charts = [chart for maker in makers for chart in maker(connection, subject)]
    lacks = bool(makers) and not charts
    return FindingPicture(charts=charts, reason=LACKING.get(subject.kind, "") if lacks else "")
