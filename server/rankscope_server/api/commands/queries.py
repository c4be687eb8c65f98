"""What was asked of the ranks of a run, and what became of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import msgspec
import sqlalchemy as sa

from rankscope.wire import thinning
from rankscope.wire.schema import OperatorTime
from rankscope_server.answers import capped, of_row
from rankscope_server.api.commands.schema import CommandRank, CommandRow, Commands, OperatorRow
from rankscope_server.problems import not_found
from rankscope_server.store import tables
from rankscope_server.store.commands import OPEN_STATES
from rankscope_server.text import plural, rank_list

MAX_COMMANDS = 50
_decode_operators = msgspec.json.Decoder(list[OperatorTime]).decode
_EXPIRED = "no answer came in time: its collector is away, or older than this server"


def commands(connection: sa.Connection, run_id: str, now_ns: int) -> Commands:
    """Return the newest commands of a run."""
    table = tables.command
    mine = table.c.run_id == run_id
    total = int(connection.scalar(sa.select(sa.func.count()).where(mine)) or 0)
    rows = connection.execute(
        sa.select(table).where(mine).order_by(table.c.id.desc()).limit(MAX_COMMANDS)
    ).all()
    found = _rows(connection, rows, now_ns)
    return Commands(commands=found, capped=capped(len(found), total))


def command(connection: sa.Connection, run_id: str, command_id: int, now_ns: int) -> CommandRow:
    """Return one command. Raises Problem 404."""
    table = tables.command
    rows = connection.execute(
        sa.select(table).where(table.c.run_id == run_id, table.c.id == command_id)
    ).all()
    if not rows:
        raise not_found(
            f"no command {command_id} in run {run_id}", f"see /api/v1/runs/{run_id}/commands", "id"
        )
    return _rows(connection, rows, now_ns)[0]


def of_finding(connection: sa.Connection, finding_id: int, now_ns: int) -> list[CommandRow]:
    """Return what a finding asked for."""
    table = tables.command
    rows = connection.execute(
        sa.select(table).where(table.c.finding_id == finding_id).order_by(table.c.id)
    ).all()
    return _rows(connection, rows, now_ns)


def trace_size(connection: sa.Connection, command_id: int, rank: int) -> int | None:
    """Return the size of a trace that is there as a whole."""
    table = tables.trace_part.c
    size, total = connection.execute(
        sa.select(sa.func.sum(sa.func.length(table.data)), sa.func.max(table.total)).where(
            table.command_id == command_id, table.rank == rank
        )
    ).one()
    return int(size) if size and size == total else None


def trace_parts(engine: sa.Engine, command_id: int, rank: int) -> Iterator[bytes]:
    """Yield a trace part by part; each is read when it is wanted."""
    table = tables.trace_part.c
    offset = 0
    while True:
        with engine.connect() as connection:
            data = connection.scalar(
                sa.select(table.data).where(
                    table.command_id == command_id, table.rank == rank, table.offset == offset
                )
            )
        if not data:
            return
        yield data
        offset += len(data)


def _rows(connection: sa.Connection, commands: Any, now_ns: int) -> list[CommandRow]:
    parts = tables.command_rank
    ids = [row.id for row in commands]
    members: dict[int, list[sa.Row[Any]]] = {}
    for part in connection.execute(
        sa.select(parts).where(parts.c.command_id.in_(ids)).order_by(parts.c.rank)
    ):
        members.setdefault(part.command_id, []).append(part)
    parts_of_traces = tables.trace_part.c
    traced = {
        (part.command_id, part.rank)
        for part in connection.execute(
            sa.select(parts_of_traces.command_id, parts_of_traces.rank)
            .where(parts_of_traces.command_id.in_(ids))
            .distinct()
        )
    }
    return [_row(row, members.get(row.id, []), traced, now_ns) for row in commands]


def _row(
    row: sa.Row[Any], parts: list[sa.Row[Any]], traced: set[tuple[int, int]], now_ns: int
) -> CommandRow:
    ranks = [_rank(row, part, traced, now_ns) for part in parts]
    return of_row(
        CommandRow,
        row,
        num_steps=row.num_steps or None,
        at_step=row.at_step or None,
        is_open=any(rank.state in OPEN_STATES for rank in ranks),
        text=_text(row, ranks),
        ranks=ranks,
    )


def _rank(
    row: sa.Row[Any], part: sa.Row[Any], traced: set[tuple[int, int]], now_ns: int
) -> CommandRank:
    is_late = part.state in ("pending", "sent") and now_ns > row.expires_ns
    has_trace = part.trace_bytes > 0 and (row.id, part.rank) in traced
    path = f"api/v1/runs/{quote(row.run_id, safe='')}/commands/{row.id}/ranks/{part.rank}/trace"
    return of_row(
        CommandRank,
        part,
        state="expired" if is_late else part.state,
        reason=_EXPIRED if is_late else part.reason,
        trace_bytes=part.trace_bytes or None,
        trace=path if has_trace else None,
        operators=[
            of_row(OperatorRow, time, self_ms=time.self_ns / 1e6 if time.self_ns >= 0 else None)
            for time in _decode_operators(part.operators)
        ],
    )


def _text(row: sa.Row[Any], ranks: list[CommandRank]) -> str:
    """Return in one sentence what was asked."""
    who = rank_list([rank.rank for rank in ranks])
    if row.is_everyone:
        who = f"all {plural(len(ranks), 'rank')}" if len(ranks) > 1 else who
    if row.kind == "stacks":
        return f"Stacks of {who}"
    if row.kind == "profile":
        return f"Profile of {plural(row.num_steps, 'step')} on {who}"
    if row.kind == "thin":
        return f"In {who} from step {row.at_step:,} on: {thinning.words(row.num_steps)}"
    what = "off" if row.kind == "agent_off" else "on"
    return f"Recording {what} in {who} before step {row.at_step:,}"
