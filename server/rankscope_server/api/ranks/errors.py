"""Errors of a run, grouped by cause, the first one first."""

from __future__ import annotations

import re
from typing import Any, Literal

import sqlalchemy as sa

from rankscope_server.answers import of_row
from rankscope_server.api.ranks.schema import ErrorGroup, Errors
from rankscope_server.store import tables
from rankscope_server.store.records import FINGERPRINT_RULE
from rankscope_server.text import plural

MAX_EVENTS = 5_000
# What a healthy rank says when another one went away.
_ECHO = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|closed by peer|broken pipe|"
    r"socket (timeout|closed)|timed ?out|timeout|watchdog|ncclRemoteError|remote process|"
    r"nccl.*abort|heartbeat|TCPStore|rendezvous|peer.*(exit|died|gone)|SIGTERM|SIGKILL|"
    r"KeyboardInterrupt",
    re.IGNORECASE,
)


def errors(connection: sa.Connection, run_id: str) -> Errors:
    """Return the error groups of a run with the part that each one played."""
    table = tables.error_event
    rows = connection.execute(
        sa.select(table)
        .where(table.c.run_id == run_id)
        .order_by(table.c.time_ns, table.c.id)
        .limit(MAX_EVENTS)
    ).all()
    members: dict[str, list[sa.Row[Any]]] = {}
    for row in rows:
        members.setdefault(row.fingerprint, []).append(row)
    initiating = next((row.fingerprint for row in rows if not _is_echo(row)), None)
    return Errors(groups=[_group(found, initiating) for found in members.values()])


def _group(rows: list[sa.Row[Any]], initiating: str | None) -> ErrorGroup:
    first = rows[0]
    role, why = _role(first, initiating)
    ranks = sorted({row.rank for row in rows})
    return of_row(
        ErrorGroup,
        first,
        id=first.fingerprint,
        ranks=ranks,
        count=len(rows),
        first_ms=first.time_ns / 1e6,
        last_ms=rows[-1].time_ns / 1e6,
        role=role,
        why_grouped=f"{plural(len(rows), 'error')} with the {FINGERPRINT_RULE} (rule 1)",
        why_role=why,
    )


def _role(
    first: sa.Row[Any], initiating: str | None
) -> tuple[Literal["initiating", "cascade", "unknown"], str]:
    if first.fingerprint == initiating:
        return "initiating", "the first error that does not speak of a lost peer"
    if _is_echo(first):
        if initiating is None:
            return "unknown", "it speaks of a lost peer, but no error of that peer was seen"
        return "cascade", "it speaks of a lost peer, and another error explains that peer"
    return "unknown", "a later error of its own kind; it may follow from the first"


def _is_echo(row: sa.Row[Any]) -> bool:
    return row.place == "collective" or bool(_ECHO.search(f"{row.type}: {row.message}"))
