"""What was communicated: sums from the rollup, or exact from the chunks of a range."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from rankscope.wire.backends import is_of_device
from rankscope.wire.schema import IMPORTED
from rankscope_server.answers import LeftOut, capped
from rankscope_server.api.ranks.chunks import MAX_CHUNKS, MAX_EVENTS, Wanted
from rankscope_server.api.ranks.schema import CollectiveRow, Collectives
from rankscope_server.api.ranks.sums import Sums, exact_sums
from rankscope_server.api.ranks.thinned import thinned_of
from rankscope_server.ingest.operations import OperationKey, OperationSum
from rankscope_server.store import tables
from rankscope_server.store.operations import sum_of_row
from rankscope_server.text import duration_text, group_text

MAX_ROWS = 500
ENQUEUED_NS = 100_000  # a wait that a host enqueues for its device returns sooner


def collectives(connection: sa.Connection, run: sa.Row[Any], wanted: Wanted) -> Collectives:
    """Return what was communicated, by operation, group and size, the most exposed first.

    Without a range of steps or a rank, of one attempt: by default the newest.
    """
    is_whole = wanted.rank is None and wanted.lo is None and wanted.hi is None
    attempt = run.attempt if wanted.attempt is None else wanted.attempt
    if is_whole:
        sums = Sums(_rollup(connection, run, attempt), attempts={attempt})
        left_out = _other_attempts(connection, run, attempt)
    else:
        sums = exact_sums(connection, wanted)
        left_out = _uncounted(sums, wanted, run)
    counted = replace(wanted, attempt=attempt) if is_whole else wanted
    first, last = _steps(connection, run, counted, sums)
    thinned = thinned_of(connection, replace(counted, lo=first, hi=last), run.world_size)
    num_whole = max((last - first + 1) * (1 - thinned.share), 1)
    groups = groups_of(connection, run, attempt)
    rows = []
    for key, value in sums.by_key.items():
        group = groups.get(key.group)
        num_ranks = None if group is None else len(group.ranks)
        ranks = 1 if wanted.rank is not None else (num_ranks or run.world_size or 1)
        is_known = is_wait_known(run, group, value.blocked_ns, value.count)
        exposed = value.blocked_ns / 1e6 / num_whole / ranks
        rows.append(
            CollectiveRow(
                operation=key.operation,
                group=key.group,
                group_text="" if group is None else group.text,
                num_ranks=num_ranks,
                size_bytes=key.size_bytes,
                count=value.count,
                p50_ms=value.percentile_ms(0.5),
                p99_ms=value.percentile_ms(0.99),
                max_ms=None if value.max_ns is None else value.max_ns / 1e6,
                exposed_ms_per_step=exposed if is_known else None,
                open=value.open,
            )
        )
    rows.sort(key=lambda row: (-(row.exposed_ms_per_step or 0), -row.count))
    return Collectives(
        rows=rows[:MAX_ROWS],
        text=_text(rows, run),
        capped=capped(MAX_ROWS, len(rows)),
        count=sum(row.count for row in rows),
        attempts=sorted(sums.attempts),
        step_lo=None if is_whole else first,
        step_hi=None if is_whole else last,
        left_out=left_out + thinned.left_out,
    )


def is_wait_known(run: sa.Row[Any], group: Group | None, blocked_ns: float, count: int) -> bool:
    """Return whether it is known how long hosts waited for some calls: 0 may mean "not seen".

    Devices wait for themselves, and recordings of other tools give waits to steps, not to calls.
    """
    if run.launcher == IMPORTED and not blocked_ns:
        return False
    return group is None or not group.is_on_device or blocked_ns > ENQUEUED_NS * count


def _rollup(
    connection: sa.Connection, run: sa.Row[Any], attempt: int
) -> dict[OperationKey, OperationSum]:
    table = tables.op_rollup
    rows = connection.execute(
        sa.select(table).where(table.c.run_id == run.run_id, table.c.attempt == attempt)
    )
    return {OperationKey(row.operation, row.group, row.size_bytes): sum_of_row(row) for row in rows}


def _other_attempts(connection: sa.Connection, run: sa.Row[Any], attempt: int) -> list[LeftOut]:
    table = tables.op_rollup.c
    rows = connection.execute(
        sa.select(table.attempt, sa.func.sum(table["count"]))
        .where(table.run_id == run.run_id, table.attempt != attempt)
        .group_by(table.attempt)
        .order_by(table.attempt)
    )
    return [LeftOut(what=f"operations of attempt {one}", count=int(count)) for one, count in rows]


def _uncounted(sums: Sums, wanted: Wanted, run: sa.Row[Any]) -> list[LeftOut]:
    found = []
    if sums.num_again:
        what = "operations of steps that a later attempt ran again"
        found.append(LeftOut(what=what, count=sums.num_again))
    if sums.is_cut:
        last = run.step if wanted.hi is None else min(wanted.hi, run.step)
        hold = f"what was sent of them holds over {MAX_EVENTS:,} operations or {MAX_CHUNKS:,} parts"
        if sums.lo is not None and sums.lo <= last:
            what = f"steps before {sums.lo:,}: {hold}; ask for fewer"
        else:
            what = f"some ranks: {hold}; ask for fewer steps or one rank"
        found.append(LeftOut(what=what, count=None))
    return found


def _steps(
    connection: sa.Connection,
    run: sa.Row[Any],
    wanted: Wanted,
    sums: Sums,
) -> tuple[int, int]:
    """Return the first and last step that was counted; where `attempt` is given, all of that."""
    table = tables.attempt.c
    where = [table.run_id == run.run_id, table.step_lo.is_not(None)]
    if wanted.attempt is not None:
        where.append(table.attempt == wanted.attempt)
    begin, end = connection.execute(
        sa.select(sa.func.min(table.step_lo), sa.func.max(table.step_hi)).where(*where)
    ).one()
    end = min(end or run.step, run.step)
    last = end if wanted.hi is None else min(wanted.hi, end)
    lo = sums.lo if sums.is_cut and sums.lo is not None and sums.lo <= last else wanted.lo
    return max(begin or 1, lo or 1), last


@dataclass(frozen=True, slots=True)
class Group:
    """A process group."""

    ranks: list[int]
    text: str
    is_on_device: bool  # the devices of its members wait, not their hosts


def groups_of(connection: sa.Connection, run: sa.Row[Any], attempt: int) -> dict[str, Group]:
    """Return the process groups of an attempt by their names."""
    table = tables.process_group.c
    rows = connection.execute(
        sa.select(table.group, table.ranks, table.backend, table.description).where(
            table.run_id == run.run_id, table.attempt == attempt
        )
    )
    found = {}
    for row in rows:
        ranks = json.loads(row.ranks)
        text = group_text(ranks, run.world_size, row.description)
        found[row.group] = Group(ranks, text, is_of_device(row.backend))
    return found


def _text(rows: list[CollectiveRow], run: sa.Row[Any]) -> str:
    if not rows:
        if run.world_size == 1:
            return "One rank: no collectives."
        return "No collective was recorded in this range."
    first = rows[0]
    if first.exposed_ms_per_step is None:
        count = sum(row.count for row in rows)
        where = "" if run.launcher == IMPORTED else " on the devices"
        return f"{count:,} operations; how long a step waits for each{where} is not known."
    total = sum(row.exposed_ms_per_step or 0 for row in rows)
    return (
        f"{sum(row.count for row in rows):,} operations; the main thread waits "
        f"{duration_text(total)} of a step for them, most in {first.operation} of "
        f"{first.group_text or f'group {first.group}'}."
    )
