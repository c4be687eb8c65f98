"""Reads what advice rests on, and makes the answer."""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa

from rankscope.wire.schema import IMPORTED
from rankscope_server.advice import store
from rankscope_server.advice.decide import LEAST_CONFIDENCE, LOOP_KIND, Cause, Decision, Situation
from rankscope_server.alerts.evaluate import STALE_SECONDS, run_path
from rankscope_server.answers import of_row
from rankscope_server.api.advice.schema import (
    Advice,
    AdviceCost,
    AdviceEvidence,
    AdviceHistory,
    AdviceReport,
    GivenAdvice,
)
from rankscope_server.api.findings.schema import ShownVerdict
from rankscope_server.api.overview.queries import answer
from rankscope_server.api.runs.queries import hosts_of, onset_step
from rankscope_server.api.steps.queries import before_and_now
from rankscope_server.diagnose.goodput.crash_loop import LOOP
from rankscope_server.findings.text import percent_text
from rankscope_server.observe.resume import last_whole_save
from rankscope_server.store import tables
from rankscope_server.text import duration_text, plural

MAX_HISTORY = 200
_MOST_SAVES = 4_096  # events of checkpoints, the newest
_ACTS = ("exclude_host", "restart_from_checkpoint")


def situation(
    connection: sa.Connection, run: sa.Row[Any], shown: ShownVerdict | None, behind_seconds: float
) -> Situation:
    """Return what is known of a run."""
    said = answer(run)
    _, step_ms = before_and_now(connection, run.run_id, run.step, onset_step(run))
    return Situation(
        status=run.status, answer_state=said.state, answer_text=said.text,
        is_recording=run.launcher == IMPORTED, is_stale=behind_seconds > STALE_SECONDS,
        cause=None if shown is None or not shown.id else _cause(connection, shown),
        num_hosts=len(hosts_of(connection, [run.run_id]).get(run.run_id, {})),
        num_ranks=run.world_size, step=run.step, saved_step=_saved_step(connection, run),
        step_ms=step_ms,
    )  # fmt: skip


def _cause(connection: sa.Connection, shown: ShownVerdict) -> Cause:
    table = tables.finding.c
    explained = [one.id for one in shown.folded if one.id is not None]
    loop = sa.select(table.id).where(table.id.in_(explained), table.key.endswith(f"/{LOOP}"))
    return Cause(
        id=shown.id, kind=shown.kind, severity=shown.severity, confidence=shown.confidence or 0.0,
        hosts=tuple(shown.hosts), ranks=tuple(shown.ranks), what=shown.what, next=shown.next,
        throughput_ratio=shown.cost_throughput_ratio,
        rank_hours_per_day=shown.cost_rank_hours_per_day,
        is_loop=shown.kind == LOOP_KIND or connection.scalar(loop.limit(1)) is not None,
    )  # fmt: skip


def _saved_step(connection: sa.Connection, run: sa.Row[Any]) -> int:
    """Return what the newest whole checkpoint holds, of the newest attempt that has one."""
    table = tables.event.c
    rows = connection.execute(
        sa.select(table.attempt, table.rank, table.step)
        .where(table.run_id == run.run_id, table.name == "checkpoint")
        .order_by(table.attempt.desc(), table.id.desc())
        .limit(_MOST_SAVES)
    )
    by_attempt: dict[int, list[tuple[int, int]]] = {}
    for attempt, rank, step in rows:
        by_attempt.setdefault(attempt, []).append((rank, step))
    saved = (last_whole_save(saves) for saves in by_attempt.values())
    return next((step for step in saved if step > 0), 0)


def advice(
    connection: sa.Connection, decision: Decision, seen: Situation, shown: ShownVerdict | None,
    run_id: str, epoch: tuple[int, int], valid_until_ms: float,
) -> Advice:  # fmt: skip
    """Return the answer."""
    number, given_ns = epoch
    facts: dict[str, Any] = msgspec.to_builtins(decision)
    return Advice(
        **facts, run_id=run_id, epoch=number, least_confidence=LEAST_CONFIDENCE,
        evidence=_evidence(run_id, decision, shown), cost_of_doing=_cost_of_doing(decision, seen),
        cost_of_not_doing=_cost_of_not_doing(decision, seen), given_ms=given_ns / 1e6,
        valid_until_ms=valid_until_ms, reports=_reports(connection, run_id, number),
    )  # fmt: skip


def _evidence(run_id: str, decision: Decision, shown: ShownVerdict | None) -> list[AdviceEvidence]:
    if shown is None or shown.id not in decision.findings:
        return []
    link = run_path(run_id, "findings", str(shown.id))
    lines = [AdviceEvidence(finding_id=shown.id, text=shown.what, link=link)]
    more = [
        AdviceEvidence(finding_id=shown.id, text=one.text, link=one.link or link)
        for one in shown.evidence
    ]
    return lines + more


def _cost_of_doing(decision: Decision, seen: Situation) -> AdviceCost:
    if decision.action not in _ACTS:
        return AdviceCost(text="nothing: nothing is done", lost_steps=0, lost_seconds=0.0)
    if not seen.saved_step:
        return AdviceCost(
            text="no checkpoint was seen: a restart may lose all steps; its length is not known"
        )
    steps = max(0, seen.step - seen.saved_step)
    if seen.step_ms is None:
        return AdviceCost(
            text=f"{plural(steps, 'step')} are done again; how long that takes is not known",
            lost_steps=steps,
        )
    text = (
        f"{plural(steps, 'step')} done again, {duration_text(steps * seen.step_ms)}, and the start"
    )
    return AdviceCost(text=text, lost_steps=steps, lost_seconds=steps * seen.step_ms / 1e3)


def _cost_of_not_doing(decision: Decision, seen: Situation) -> AdviceCost:
    cause = seen.cause
    if cause is None or cause.id not in decision.findings:
        text = "not known" if decision.action == "unknown" else "nothing that is known"
        return AdviceCost(text=text)
    share, hours = cause.throughput_ratio, cause.rank_hours_per_day
    if decision.action == "restart_from_checkpoint" or seen.status in ("stuck", "failed"):
        share, hours = 1.0, seen.num_ranks * 24.0 or None
    if share is None:
        return AdviceCost(text="not known", rank_hours_per_day=hours)
    more = "" if hours is None else f", {hours:,.0f} rank-hours a day"
    return AdviceCost(
        text=f"{percent_text(share)} of the throughput{more}", throughput_ratio=share,
        rank_hours_per_day=hours,
    )  # fmt: skip


def history(connection: sa.Connection, run_id: str) -> AdviceHistory:
    """Return what was advised and what was done."""
    given = [
        GivenAdvice(
            epoch=row.epoch, given_ms=row.given_ns / 1e6,
            **{
                name: value
                for name, value in msgspec.to_builtins(store.decision_of(row)).items()
                if name in GivenAdvice.__struct_fields__
            },
        )
        for row in store.given(connection, run_id, MAX_HISTORY)
    ]  # fmt: skip
    return AdviceHistory(given=given, reports=_reports(connection, run_id, None))


def _reports(connection: sa.Connection, run_id: str, epoch: int | None) -> list[AdviceReport]:
    return [
        of_row(AdviceReport, row)
        for row in store.reports(connection, run_id, MAX_HISTORY)
        if epoch in (None, row.epoch)
    ]
