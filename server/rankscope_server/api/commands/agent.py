"""What the agent of a run reports of itself: sources, what it skipped, what it lost."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import sqlalchemy as sa

from rankscope.wire import schema, thinning
from rankscope_server.answers import capped, of_row
from rankscope_server.api.commands.schema import AgentAnswer, SourceChange, SourceRow, SourceState
from rankscope_server.api.runs.queries import losses, rank_rows
from rankscope_server.store import tables
from rankscope_server.text import plural, rank_list

MAX_CHANGES = 100
_decode_state = msgspec.json.Decoder(schema.RankState).decode
_PREFIXES: tuple[tuple[str, SourceState], ...] = (
    ("skipped", "skipped"), ("waits", "waits"), ("failed", "failed"), ("switched off", "off"),
    ("removed", "off"),
)  # fmt: skip


def agent(connection: sa.Connection, run: sa.Row[Any]) -> AgentAnswer:
    """Return what the agents of the newest attempt report."""
    rows = [
        row
        for row in rank_rows(connection, run.run_id, run.attempt)
        if row.registered_ns is not None
    ]
    sources = _sources(rows)
    off = [row.rank for row in rows if "switched off" in json.loads(row.sources).values()]
    alone = [row.rank for row in rows if _is_alone(row) and row.rank not in off]
    changes, num_changes = _changes(connection, run)
    lost = losses(connection, run.run_id)
    is_live = any(row.ended_ns is None for row in rows) and run.status not in ("ended", "failed")
    return AgentAnswer(
        text=_text(rows, sources, off, "Recording" if is_live else "Recorded")
        + _lost_text(rows, lost.count),
        num_ranks=len(rows),
        off=off,
        alone=alone,
        sources=sources,
        changes=changes,
        losses=lost.rows,
        losses_capped=capped(len(lost.rows), lost.num_reasons),
        changes_capped=capped(len(changes), num_changes),
        is_live=is_live,
    )


def _sources(rows: list[sa.Row[Any]]) -> list[SourceRow]:
    """Group equal sources of all ranks into one row each, in the order of the hooks."""
    ranks: dict[tuple[str, str], list[int]] = {}
    order: dict[str, int] = {}
    for row in rows:
        for hook, source in json.loads(row.sources).items():
            order.setdefault(hook, len(order))
            ranks.setdefault((hook, source), []).append(row.rank)
    found = []

    def order_of(row: tuple[tuple[str, str], list[int]]) -> tuple[int, str]:
        hook = row[0][0]  # "collectives/probe" comes after "collectives"
        return order.get(hook.partition("/")[0], order[hook]), hook

    for (hook, text), members in sorted(ranks.items(), key=order_of):
        state = _state(text)
        reason = text.partition(":")[2].strip() if state == "skipped" else ""
        found.append(
            SourceRow(
                hook=hook,
                state=state,
                source="" if reason else text,
                reason=reason,
                ranks=members,
                ranks_text=_who(members, len(rows)),
            )
        )
    return found


def _state(text: str) -> SourceState:
    return next((state for prefix, state in _PREFIXES if text.startswith(prefix)), "used")


def _who(members: list[int], total: int) -> str:
    if len(members) == total:
        return "all ranks" if total > 1 else "the only rank"
    return rank_list(members)


def _is_alone(row: sa.Row[Any]) -> bool:
    return row.state is not None and not _decode_state(row.state).is_recording


def _changes(connection: sa.Connection, run: sa.Row[Any]) -> tuple[list[SourceChange], int]:
    """Return the newest changes, and how many there are."""
    table = tables.event
    where = (table.c.run_id == run.run_id, table.c.name == schema.THINNING_CHANGED)
    total = connection.scalar(sa.select(sa.func.count()).select_from(table).where(*where))
    rows = connection.execute(
        sa.select(table)
        .where(*where)
        .order_by(table.c.time_ns.desc(), table.c.id.desc())
        .limit(MAX_CHANGES)
    )
    return [_change(row, json.loads(row.fields)) for row in rows], int(total or 0)


def _change(row: sa.Row[Any], fields: dict[str, str]) -> SourceChange:
    return of_row(
        SourceChange,
        row,
        old=_level(fields.get("from_level")),
        new=_level(fields.get("level")),
        why=_why(fields),
        overhead_ratio=_ratio(fields.get("overhead_ratio")),
        budget_ratio=_ratio(fields.get("budget_ratio")),
    )


def _level(text: Any) -> str:
    return thinning.words(int(text)) if str(text).isdecimal() else ""


def _why(fields: dict[str, str]) -> str:
    each_us = fields.get("us_per_collective")
    costs = f"{fields.get('source', '')}: {each_us} us for each collective" if each_us else ""
    servers = fields.get("servers_why")
    server = f"the server did not keep up ({servers})" if servers else ""
    return "; ".join(part for part in (server, str(fields.get("why", "")), costs) if part)


def _ratio(text: Any) -> float | None:
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None


def _text(rows: list[sa.Row[Any]], sources: list[SourceRow], off: list[int], recording: str) -> str:
    """Return in one sentence how the agent is."""
    if not rows:
        return "No rank has registered yet"
    if len(off) == len(rows):
        return f"Switched off in all {plural(len(rows), 'rank')}: nothing is recorded"
    if off:
        others = len(rows) - len(off)
        return f"Switched off in {rank_list(off)}, {recording.lower()} in {plural(others, 'other')}"
    skipped = sorted({row.hook for row in sources if row.state in ("skipped", "failed")})
    used = [row for row in sources if row.hook == "collectives"]
    seen = " and ".join(
        f"{row.source.partition(':')[0]} in {row.ranks_text}" for row in used if row.state == "used"
    )
    first = f"{recording}; collectives by {seen}" if seen else f"{recording}, but no collectives"
    return first + (f"; {plural(len(skipped), 'hook')} skipped" if skipped else "")


def _lost_text(rows: list[sa.Row[Any]], num_lost: int) -> str:
    if not rows:
        return ""
    return f"; {num_lost:,} records were lost" if num_lost else "; no record was lost"
