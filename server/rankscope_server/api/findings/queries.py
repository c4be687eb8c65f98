"""Findings, their history, and the verdict of a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from rankscope.wire.formulas import rank_hours_per_day
from rankscope_server.answers import capped, json_object, of_row, to_ms
from rankscope_server.api.commands.queries import of_finding as commands_of_finding
from rankscope_server.api.findings.citing import Citing
from rankscope_server.api.findings.schema import (
    Detector,
    Evidence,
    FindingDetail,
    Findings,
    FindingStack,
    Folded,
    HistoryEvent,
    ShownFinding,
    ShownVerdict,
)
from rankscope_server.findings.text import times_text
from rankscope_server.prices import Rate
from rankscope_server.problems import not_found
from rankscope_server.store import tables

MAX_RECOVERED = 500
MAX_STACKS = 24
MAX_STACK_RANKS = 16
STACKS_AROUND_NS = 120 * 10**9  # the collector takes the first ones before the finding opens
MAX_TIME_NS = 1 << 62
_BOOKKEEPING = {"id", "state", "opened_ms", "updated_ms", "recovered_ms"}
_NEEDS_LESS = frozenset({"unused_memory", "gpu_underuse"})  # kinds that a smaller host may serve
_MAX_CHEAPER = 3  # hosts of the price list
_PRICED = {"cost_money_per_day", "currency"}
_TRANSLATED = {"evidence", "explained_by"}
_FIELDS = set(ShownFinding.__struct_fields__) - _BOOKKEEPING - _TRANSLATED - _PRICED


def findings(connection: sa.Connection, run: sa.Row[Any], rate: Rate | None = None) -> Findings:
    """Return the findings of a run, open ones by cost, recovered ones newest first.

    `rate` is what an hour of a rank costs, None where that is not asked for, or not known.
    """
    rows = _rows(connection, run.run_id)[::-1]
    ids, citing = _ids(rows), Citing(connection, run)
    made = [(row, finding_of(row, ids, citing, rate)) for row in rows]
    still = [finding for row, finding in made if row.state != "recovered"]
    over = [finding for row, finding in made if row.state == "recovered"]
    still.sort(key=lambda finding: -(finding.cost_throughput_ratio or 0.0))
    return Findings(
        open=still,
        recovered=over[:MAX_RECOVERED],
        recovered_capped=capped(MAX_RECOVERED, len(over)),
        detectors=msgspec.convert(json_object(run.detectors) or [], list[Detector]),
        steps=run.step,
    )


def finding_detail(
    connection: sa.Connection, run: sa.Row[Any], finding_id: int, rate: Rate | None = None
) -> FindingDetail:
    """Return a finding with its history. Raises Problem 404."""
    run_id = run.run_id
    rows = _rows(connection, run_id)
    row = next((row for row in rows if row.id == finding_id), None)
    if row is None:
        raise not_found(
            f"no finding {finding_id} in run {run_id}", f"see /api/v1/runs/{run_id}/findings", "id"
        )
    events = connection.execute(
        sa.select(tables.finding_event)
        .where(tables.finding_event.c.finding_id == finding_id)
        .order_by(tables.finding_event.c.id)
    )
    base = msgspec.structs.asdict(finding_of(row, _ids(rows), Citing(connection, run), rate))
    stacks, num_stacks = _stacks(connection, row, base["ranks"] or base["victims"])
    return FindingDetail(
        **base,
        history=[of_row(HistoryEvent, event) for event in events],
        stacks=stacks,
        stacks_capped=capped(len(stacks), num_stacks),
        commands=commands_of_finding(connection, finding_id, time.time_ns()),
    )


def _stacks(
    connection: sa.Connection, row: sa.Row[Any], ranks: list[int]
) -> tuple[list[FindingStack], int]:
    """Return stacks that the named ranks wrote in a hang, the newest of each first; of how many."""
    if json_object(row.body).get("kind") != "hang":
        return [], 0
    table = tables.stacks
    onset_ms = json_object(row.body).get("onset_ms")
    since_ns = row.opened_ns - STACKS_AROUND_NS if onset_ms is None else int(onset_ms * 1e6)
    where = (
        table.c.run_id == row.run_id,
        table.c.attempt == row.attempt,
        table.c.time_ns >= since_ns,
        table.c.time_ns <= (row.recovered_ns or MAX_TIME_NS) + STACKS_AROUND_NS,
    )
    written = connection.execute(
        sa.select(table.c.rank, sa.func.count()).where(*where).group_by(table.c.rank)
    )
    counts = {rank: count for rank, count in written if rank in set(ranks)}
    rows = connection.execute(
        sa.select(table)
        .where(
            *where, table.c.rank.in_([rank for rank in ranks if rank in counts][:MAX_STACK_RANKS])
        )
        .order_by(table.c.rank, table.c.id.desc())
        .limit(MAX_STACKS)
    )
    return [of_row(FindingStack, stack) for stack in rows], sum(counts.values())


def verdict(
    connection: sa.Connection, run: sa.Row[Any], rate: Rate | None = None
) -> ShownVerdict | None:
    """Return the verdict of a run with the ids of the findings that it names."""
    body = json_object(run.verdict)
    if body is None:
        return None
    rows = _rows(connection, run.run_id)
    ids = _ids(rows)
    row = next((row for row in rows if row.id == ids.get(str(body.get("key")))), None)
    folded = [Folded(id=ids.get(item["key"]), what=item["what"]) for item in body.get("folded", [])]
    values = _values(body, ids) | {"folded": folded, "deciding": body.get("deciding", [])}
    values |= _money(values, rate)
    values["evidence"] += _cheaper(values, rate)
    if row is None:
        return ShownVerdict(**values, id=0, state="open")
    _cite(values, Citing(connection, run).about(body, row.opened_ns))
    return ShownVerdict(**values, **_bookkeeping(row))


def finding_of(
    row: sa.Row[Any], ids: dict[str, int], citing: Citing, rate: Rate | None = None
) -> ShownFinding:
    """Return the finding that a row holds; `ids` turns keys of other findings into ids."""
    body = json_object(row.body)
    values = _values(body, ids)
    values |= _money(values, rate)
    values["evidence"] += _cheaper(values, rate)
    _cite(values, citing.about(body, row.opened_ns))
    return ShownFinding(**values, **_bookkeeping(row))


def _cite(values: dict[str, Any], cited: list[Evidence]) -> None:
    """Put what is cited behind the first line: of many, pages show the first ones."""
    values["evidence"][1:1] = cited


def _money(values: dict[str, Any], rate: Rate | None) -> dict[str, Any]:
    """Return what a finding costs a day, nothing where that or the price is not known."""
    hours = values.get("cost_rank_hours_per_day")
    if hours is None or rate is None:
        return {}
    return {"cost_money_per_day": hours * rate.per_rank_hour, "currency": rate.currency}


def _cheaper(values: dict[str, Any], rate: Rate | None) -> list[Evidence]:
    """Return what the run costs that needs less than it has, and when cheaper hosts would pay."""
    if values.get("kind") not in _NEEDS_LESS or rate is None:
        return []
    day = rank_hours_per_day(rate.num_ranks, 1.0) * rate.per_rank_hour
    found = [Evidence(text=f"By the price list its hosts cost {rate.text(day)} a day")]
    for row in [row for row in rate.cheaper if row.price > 0][:_MAX_CHEAPER]:
        found.append(Evidence(
            text=f"A host {row.pattern} costs {rate.text(row.price)} an hour in place of "
            f"{rate.text(rate.host_hour)}: with as many ranks on each it pays while a step takes "
            f"less than {times_text(rate.host_hour / row.price)} as long there"
        ))  # fmt: skip
    return found


def _bookkeeping(row: sa.Row[Any]) -> dict[str, Any]:
    return {
        "id": row.id,
        "state": row.state,
        "opened_ms": to_ms(row.opened_ns),
        "updated_ms": to_ms(row.updated_ns),
        "recovered_ms": to_ms(row.recovered_ns),
    }


def _values(body: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    values = {name: body[name] for name in _FIELDS if name in body}
    values["evidence"] = [
        msgspec.convert(item, Evidence) if isinstance(item, dict) else Evidence(text=str(item))
        for item in body.get("evidence", [])
    ]
    explained = body.get("explained_by")
    values["explained_by"] = ids.get(str(explained)) if explained is not None else None
    return values


def _rows(connection: sa.Connection, run_id: str) -> Sequence[sa.Row[Any]]:
    """Return the rows of the findings of a run, the newest last."""
    table = tables.finding
    query = sa.select(table).where(table.c.run_id == run_id).order_by(table.c.id)
    return connection.execute(query).all()


def _ids(rows: Sequence[sa.Row[Any]]) -> dict[str, int]:
    return {row.key: row.id for row in sorted(rows, key=lambda row: int(row.id))}
