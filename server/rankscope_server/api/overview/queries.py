"""The first page of a run: coverage, verdict, key numbers, attempts."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import sqlalchemy as sa

from rankscope.wire.metric_names import PRINTED_LOSS
from rankscope.wire.schema import IMPORTED
from rankscope.wire.trackers import FIELDS, TITLES
from rankscope_server.answers import capped, json_object, of_row, to_ms
from rankscope_server.api.findings.queries import verdict
from rankscope_server.api.overview.schema import (
    Attempt,
    Counts,
    Coverage,
    Number,
    Overview,
    ShownAnswer,
    SilentRank,
    TrackerRun,
)
from rankscope_server.api.runs.environment import num_differences
from rankscope_server.api.runs.queries import (
    NOT_LOOKED_AT,
    RANK_HEAD,
    hosts_of,
    is_silent,
    losses,
    missing_batches,
    onset_step,
    rank_rows,
    rate_of,
    role_of,
    run_row,
    summary,
)
from rankscope_server.api.runs.schema import LossRow
from rankscope_server.api.steps.queries import (
    RECENT_STEPS,
    before_and_now,
    known,
    load_range,
    quiet,
    steps_of_many,
    typical_range,
    waiting_planes,
    warm_up_text,
)
from rankscope_server.api.storage.removed import removed
from rankscope_server.findings.finding import SEVERITIES
from rankscope_server.findings.text import percent_text
from rankscope_server.ingest.step_metrics import STARTED
from rankscope_server.prices import NO_PRICES, PriceList
from rankscope_server.store import tables
from rankscope_server.store.deletion import OVER
from rankscope_server.text import duration_text, exit_text, plural, rank_list
from rankscope_server.verdict.budget import share_of, waiting_ratio

_OPEN = ("open", "acknowledged")
_PLANES = ("step", "blocked", "num_collectives", STARTED)
_EVEN_SHARE = 0.02  # a mean further than this from the typical step is shown beside it
_LEAST_SHARE = 0.001  # less of a step is not worth words


def overview(
    connection: sa.Connection, run_id: str, silent_before_ns: int, prices: PriceList = NO_PRICES
) -> Overview:
    """Return the first page of a run. Raises Problem 404."""
    run = run_row(connection, run_id)
    ranks = rank_rows(connection, run_id, run.attempt, RANK_HEAD)
    return Overview(
        run=summary(run, hosts_of(connection, [run_id]).get(run_id, {})),
        coverage=coverage(connection, run, ranks, silent_before_ns),
        verdict=verdict(connection, run, rate_of(connection, run, prices)),
        answer=answer(run),
        numbers=numbers(connection, run, ranks),
        attempts=attempts(connection, run),
        counts=counts(connection, run),
        removed=removed(connection, run_id),
        trackers=trackers(run),
    )


def coverage(
    connection: sa.Connection,
    run: sa.Row[Any],
    ranks: list[sa.Row[Any]],
    silent_before_ns: int,
) -> Coverage:
    """Return how much of a run is seen, and what was lost."""
    registered = [row for row in ranks if row.registered_ns is not None]
    silent = [of_row(SilentRank, row) for row in ranks if is_silent(row, run, silent_before_ns)]
    expected = max(run.world_size, len(ranks))
    reporting = len(ranks) - len(silent)
    missing = missing_batches(connection, run.run_id)
    lost = losses(connection, run.run_id)
    return Coverage(
        expected=expected,
        registered=len(registered),
        reporting=reporting,
        silent=silent,
        losses=lost.rows,
        losses_capped=capped(len(lost.rows), lost.num_reasons),
        lost=lost.count,
        refused=run.refused,
        missing_batches=missing,
        notes=answer(run).notes,
        text=_coverage_text(expected, reporting, silent, lost.rows, missing, _seen_as(run)),
    )


def numbers(connection: sa.Connection, run: sa.Row[Any], ranks: list[sa.Row[Any]]) -> list[Number]:
    """Return the key numbers: step time, waiting, throughput, loss."""
    onset = onset_step(run)
    before, now = before_and_now(connection, run.run_id, run.step, onset)
    change = None if not before or now is None else now / before - 1
    where = f"before step {onset:,}" if onset else "early in the run"
    reference = "" if before is None else f"from {duration_text(before)} {where}"
    stages = {row.rank: role_of(row) for row in ranks}
    count = min(RECENT_STEPS, steps_of_many(run.world_size, stages))
    lo, _ = typical_range(connection, run.run_id, run.step, count, onset)
    planes = waiting_planes(load_range(connection, run.run_id, _PLANES, lo, run.step))
    roles = [stages.get(rank, -1) for rank in range(len(planes["step"]))]
    waiting = waiting_ratio(planes["step"], planes["blocked"], roles)
    recent = f"last {plural(run.step - lo + 1, 'step')}" if now is not None else ""
    pace = _steps_per_second(planes[STARTED]) or (1e3 / now if now else None)
    found = [
        Number(
            key="step_time", label="Step time", value=now, unit="ms", change_ratio=change,
            reference_text=reference or warm_up_text(connection, run.run_id, run.step),
        ),
        Number(
            key="waiting", label="Waiting for peers", value=waiting, unit="ratio",
            reference_text=f"mean over ranks, {recent}{_more(planes, waiting)}" if recent else "",
        ),
        Number(
            key="throughput", label="Throughput", value=pace,
            unit="steps/s", reference_text=recent + _mean_text(pace, now),
        ),
    ]  # fmt: skip
    loss = _last_loss(connection, run.run_id)
    return found if loss is None else [*found, loss]


def attempts(connection: sa.Connection, run: sa.Row[Any]) -> list[Attempt]:
    """Return the (re)starts of a run, the first one first."""
    rows = connection.execute(
        sa.select(tables.attempt)
        .where(tables.attempt.c.run_id == run.run_id)
        .order_by(tables.attempt.c.attempt)
    ).all()
    ends = _ends(connection, run.run_id)
    return [
        of_row(
            Attempt,
            row,
            ended_ms=to_ms(end.last_ns) if end is not None and end.ended == end.ranks else None,
            world_size=row.world_size or None,
            exit_text="" if end is None else _attempt_exit_text(connection, run.run_id, end),
        )
        for row in rows
        for end in (ends.get(row.attempt),)
    ]


def _ends(connection: sa.Connection, run_id: str) -> dict[int, sa.Row[Any]]:
    """Return for each attempt how many ranks it has, how many ended, cleanly, and when the last."""
    table = tables.rank.c
    rows = connection.execute(
        sa.select(
            table.attempt,
            sa.func.count().label("ranks"),
            sa.func.count(table.ended_ns).label("ended"),
            sa.func.count(sa.case((table.end_reason == "clean", 1))).label("clean"),
            sa.func.max(table.ended_ns).label("last_ns"),
        )
        .where(table.run_id == run_id)
        .group_by(table.attempt)
    )
    return {row.attempt: row for row in rows}


def _attempt_exit_text(connection: sa.Connection, run_id: str, end: sa.Row[Any]) -> str:
    """Return how an attempt ended: the rank that failed first, or that all ended cleanly."""
    if not end.ended:
        return ""
    if end.clean < end.ended:
        table = tables.rank
        failed = sa.func.coalesce(table.c.end_reason, "") != "clean"
        first = connection.execute(
            sa.select(table)
            .where(table.c.run_id == run_id, table.c.attempt == end.attempt)
            .where(table.c.ended_ns.is_not(None), failed)
            .order_by(table.c.ended_ns, table.c.rank)
            .limit(1)
        ).one()
        return f"rank {first.rank}: {exit_text(first)}"
    if end.ended == end.ranks:
        return "all ranks ended cleanly"
    return f"{end.ended} of {end.ranks} ranks ended cleanly"


def counts(connection: sa.Connection, run: sa.Row[Any]) -> Counts:
    """Return how many findings, errors, lines and differences a run has."""
    table = tables.finding.c
    rows = connection.execute(
        sa.select(table.state, sa.func.count())
        .where(table.run_id == run.run_id)
        .group_by(table.state)
    )
    states = {state: int(count) for state, count in rows}
    open_bodies = connection.scalars(
        sa.select(table.body).where(table.run_id == run.run_id, table.state.in_(_OPEN))
    )
    severities = [json_object(body)["severity"] for body in open_bodies]
    errors = connection.scalar(
        sa.select(sa.func.count())
        .select_from(tables.error_event)
        .where(tables.error_event.c.run_id == run.run_id)
    )
    return Counts(
        findings_open=len(severities),
        findings_worst=min(severities, key=SEVERITIES.index, default=None),
        findings_recovered=states.get("recovered", 0),
        errors=int(errors or 0),
        log_lines=run.log_lines,
        environment_differences=num_differences(connection, run.run_id, run.attempt),
    )


def _coverage_text(
    expected: int,
    reporting: int,
    silent: list[SilentRank],
    losses: list[LossRow],
    missing: int,
    seen_as: str,
) -> str:
    if not expected:
        return "No rank has registered yet"
    text = f"{reporting:,} of {plural(expected, 'rank')} {seen_as}"
    if silent:
        text += f"; {rank_list([row.rank for row in silent])} silent"
        text += f" since step {min(row.step for row in silent):,}"
    if losses:
        first = losses[0]
        text += f"; {first.count:,} {first.source} lost on {first.host}: {first.reason}"
    if missing:
        text += f"; {plural(missing, 'batch')} missing".replace("batchs", "batches")
    return text


def _seen_as(run: sa.Row[Any]) -> str:
    if run.launcher == IMPORTED:
        return "recorded"
    return "reported" if run.status in OVER else "reporting"


def _more(planes: dict[str, Any], waiting: float | None) -> str:
    """Return what ranks were blocked for beyond waiting for later ones: the transfers."""
    blocked = share_of(planes["blocked"], planes["step"])
    if blocked is None or waiting is None or blocked - waiting < _LEAST_SHARE:
        return ""
    return f"; {percent_text(blocked - waiting)} more in communication"


def _mean_text(steps_per_second: float | None, typical_ms: float | None) -> str:
    """Return the mean step time where it is another than the typical one: some steps are long."""
    if not steps_per_second or not typical_ms:
        return ""
    mean_ms = 1e3 / steps_per_second
    is_even = abs(mean_ms - typical_ms) <= _EVEN_SHARE * typical_ms
    return "" if is_even else f", {duration_text(mean_ms)} a step on average"


def _steps_per_second(started: np.ndarray[Any, Any]) -> float | None:
    times = quiet(np.nanmax, np.where(started > 0, started / 1e9, np.nan), axis=0)
    seen = np.flatnonzero(~np.isnan(times))
    if len(seen) < 2 or times[seen[-1]] <= times[seen[0]]:
        return None
    return known((seen[-1] - seen[0]) / (times[seen[-1]] - times[seen[0]]))


def _last_loss(connection: sa.Connection, run_id: str) -> Number | None:
    table = tables.metric.c
    for name, source in (
        ("logged_loss", "as the framework logs it"),
        (PRINTED_LOSS, "as the script prints it"),
        ("loss", "the value of backward()"),
    ):
        # a line may name the batch of its epoch, or no step
        newest = [table.time_ns.desc()] if name == PRINTED_LOSS else [table.step.desc()]
        row = connection.execute(
            sa.select(table.value, table.step)
            .where(table.run_id == run_id, table.name == name)
            .order_by(*newest, table.attempt.desc(), table.rank)
            .limit(1)
        ).first()
        if row is not None:
            text = f"step {row.step:,}, {source}" if row.step else source
            text += "" if row.value is not None else ", not a finite number"
            return Number(key="loss", label="Loss", value=row.value, unit="", reference_text=text)
    return None


def trackers(run: sa.Row[Any]) -> list[TrackerRun]:
    """Return the runs of trackers that ranks log to, in the order of `TITLES`.

    An address leads somewhere only if it is one of the web: ranks say what they like.
    """
    known = json_object(run.trackers)
    return [
        TrackerRun(
            **{name: known[tracker][name] for name in (*FIELDS, "rank") if name != "page"},
            title=title,
            page=page if page.startswith(("https://", "http://")) else None,
        )
        for tracker, title in TITLES.items()
        if tracker in known
        for page in (known[tracker]["page"],)
    ]


def answer(run: sa.Row[Any]) -> ShownAnswer:
    """Return the first sentence of a run's page."""
    body = json_object(run.answer)
    if body is None:
        return ShownAnswer(state="waiting", text=NOT_LOOKED_AT, detail="")
    return msgspec.convert(body, ShownAnswer)
