"""Errors of a run, grouped by cause, the first one first."""

from __future__ import annotations

import re
from typing import Any, Literal

import sqlalchemy as sa

from rankscope_server.answers import capped, of_row
from rankscope_server.api.ranks.schema import ErrorGroup, Errors
from rankscope_server.store import tables
from rankscope_server.store.records import FINGERPRINT_RULE
from rankscope_server.text import plural

MAX_GROUPS = 200
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
    total = connection.scalar(
        sa.select(sa.func.count(table.c.fingerprint.distinct())).where(table.c.run_id == run_id)
    )
    counted = connection.execute(
        sa.select(
            table.c.fingerprint,
            sa.func.count().label("number"),
            sa.func.min(table.c.time_ns).label("first_ns"),
            sa.func.max(table.c.time_ns).label("last_ns"),
        )
        .where(table.c.run_id == run_id)
        .group_by(table.c.fingerprint)
        .order_by("first_ns", sa.func.min(table.c.id))
        .limit(MAX_GROUPS)
    ).all()
    groups = [(row, _first(connection, run_id, row)) for row in counted]
    groups.sort(key=lambda group: (group[1].time_ns, group[1].id))
    initiating = next((first.fingerprint for _, first in groups if not _is_echo(first)), None)
    return Errors(
        groups=[
            _group(row, first, _ranks(connection, run_id, row.fingerprint), initiating)
            for row, first in groups
        ],
        capped=capped(len(groups), int(total or 0)),
    )


def _first(connection: sa.Connection, run_id: str, group: sa.Row[Any]) -> sa.Row[Any]:
    table = tables.error_event
    return connection.execute(
        sa.select(table)
        .where(
            table.c.run_id == run_id,
            table.c.fingerprint == group.fingerprint,
            table.c.time_ns == group.first_ns,
        )
        .order_by(table.c.id)
        .limit(1)
    ).one()


def _ranks(connection: sa.Connection, run_id: str, fingerprint: str) -> list[int]:
    table = tables.error_event.c
    return list(
        connection.scalars(
            sa.select(table.rank)
            .where(table.run_id == run_id, table.fingerprint == fingerprint)
            .distinct()
            .order_by(table.rank)
        )
    )


def _group(
    counted: sa.Row[Any], first: sa.Row[Any], ranks: list[int], initiating: str | None
) -> ErrorGroup:
    role, why = _role(first, initiating)
    return of_row(
        ErrorGroup,
        first,
        id=first.fingerprint,
        ranks=ranks,
        count=counted.number,
        first_ms=counted.first_ns / 1e6,
        last_ms=counted.last_ns / 1e6,
        role=role,
        why_grouped=f"{plural(counted.number, 'error')} with the {FINGERPRINT_RULE} (rule 1)",
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
