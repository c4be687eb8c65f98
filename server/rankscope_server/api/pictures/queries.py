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

_NO_NUMBERS = "no number of training of these steps is stored"
_NO_SAMPLES = "no sample of the machines around its onset is stored"
_NO_STEPS = "no step around its onset is stored"
_NO_CLOCKS = "no measurement of clocks and no step of other ranks is stored"
_GPU = (_NO_SAMPLES, (samples("gpu_clock", "gpu_temperature", "gpu_power"),))
_PROCESSORS = (_NO_SAMPLES, (samples("rank_processors", "node_processors"),))
# By kind of finding: why there may be none, and what draws its charts.
PICTURES: dict[str, tuple[str, tuple[Maker, ...]]] = {
    "memory_growth": (_NO_NUMBERS, (memory,)),
    "fragmentation": (_NO_NUMBERS, (memory,)),
    "nan": (_NO_NUMBERS, (numbers(LOSS, LOCAL_NORM, NORM),)),
    "loss_spike": (_NO_NUMBERS, (numbers(LOSS, NORM),)),
    "divergence": (_NO_NUMBERS, (numbers(LOSS, PRINTED, NORM),)),
    "nothing_learnt": (_NO_NUMBERS, (numbers(LOSS, NORM),)),
    "corruption": (_NO_NUMBERS, (numbers(LOCAL_NORM, LOSS),)),
    "corrupt_batch": (_NO_NUMBERS, (numbers(LOSS, LOCAL_NORM),)),
    "clock_offset": (_NO_CLOCKS, (clocks,)),
    "clock_drift": (_NO_CLOCKS, (clocks,)),
    "slow_link": (_NO_STEPS, (links, pace)),
    "low_bus_bandwidth": (_NO_STEPS, (pace,)),
    "communication_bound": (_NO_STEPS, (pace,)),
    "slowdown": (_NO_STEPS, (pace,)),
    "thermal_or_power": _GPU,
    "throttle": _GPU,
    "power_cap": _GPU,
    "gpu_outlier": _GPU,
    "gpu_underuse": (_NO_SAMPLES, (samples("gpu_utilization"),)),
    "host_contention": _PROCESSORS,
    "cpu_limit": _PROCESSORS,
    "cpu_pinning": _PROCESSORS,
}


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
    reason, makers = PICTURES.get(subject.kind, ("", ()))
    charts = [chart for maker in makers for chart in maker(connection, subject)]
    return FindingPicture(charts=charts, reason="" if charts else reason)
