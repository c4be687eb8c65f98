"""What the analysis asks of ranks: stacks in hangs and of slow ranks, a level of thinning."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from rankscope.wire import schema
from rankscope_server.analysis.state import ThinningAsked
from rankscope_server.analysis.stored_findings import StoredFinding
from rankscope_server.store import tables
from rankscope_server.store.commands import Asked, CommandRefusedError, create
from rankscope_server.store.unit import Unit

MAX_PER_INCIDENT = 3  # stacks that a finding asks for, of each rank
INCIDENT_PAUSES_NS = (0, 10 * 10**9, 30 * 10**9)  # before the first, second, third
MAX_INCIDENT_RANKS = 16
_MOST_SAMPLED = 4  # slow ranks of one finding
STACK_SAMPLES, SAMPLE_PAUSE_NS = 16, 3 * 10**9  # of a slow rank and of one that waits for it
_THINNING_PAUSE_NS = 15 * 10**9  # for the states of the ranks to say that it was done
# The same for the server's sake: what ranks say of it comes late, or they take no commands.
_SHEDDING_PAUSE_NS, _REFUSED_PAUSE_NS = 60 * 10**9, 600 * 10**9


def ask_in_hangs(unit: Unit, run_id: str, known: Mapping[tuple[int, str], StoredFinding]) -> bool:
    """Ask for stacks of the ranks that open findings of hangs name; return whether any was."""
    asked = [
        ask_for_stacks(
            unit, run_id, stored.id, stored.body.get("ranks") or stored.body.get("victims", [])
        )
        for stored in _open_now(unit, run_id, known, "hang")
    ]
    return any(number is not None for number in asked)


def _open_now(
    unit: Unit, run_id: str, known: Mapping[tuple[int, str], StoredFinding], detector: str
) -> list[StoredFinding]:
    """Return the open findings above info of a detector on the newest attempt."""
    found = [
        (attempt, stored)
        for (attempt, _), stored in known.items()
        if stored.body.get("detector") == detector
        and stored.state != "recovered"
        and stored.body.get("severity") in ("critical", "warning")
    ]
    if not found:
        return []
    newest = unit.connection.scalar(
        sa.select(tables.run.c.attempt).where(tables.run.c.run_id == run_id)
    )
    return [stored for attempt, stored in found if attempt == newest]


def ask_of_the_slow(
    unit: Unit, run_id: str, known: Mapping[tuple[int, str], StoredFinding]
) -> bool:
    """Sample the stacks of slow ranks and of one that waits for them; return whether any was asked.

    What only a slow one is in, stack after stack, is what it does instead.
    """
    table, has_asked = tables.command.c, False
    for stored in _open_now(unit, run_id, known, "straggler"):
        ranks, victims = stored.body.get("ranks"), stored.body.get("victims")
        number, last = unit.connection.execute(
            sa.select(sa.func.count(), sa.func.max(table.created_ns)).where(
                table.run_id == run_id, table.finding_id == stored.id
            )
        ).one()
        is_due = number < STACK_SAMPLES and unit.now_ns - (last or 0) >= SAMPLE_PAUSE_NS
        if not (ranks and victims and is_due):
            continue
        asked_by = f"{schema.SAMPLING} of finding {stored.id}"
        with contextlib.suppress(CommandRefusedError):  # one of them is gone meanwhile
            some = [*ranks[:_MOST_SAMPLED], victims[0]]
            asked = Asked("stacks", some, asked_by=asked_by, finding_id=stored.id)
            create(unit, run_id, asked)
            has_asked = True
    return has_asked


def ask_to_thin(unit: Unit, run_id: str, asked: ThinningAsked, late_seconds: float) -> bool:
    """Ask all ranks for a level of thinning, unless that has just been done.

    `late_seconds` is how old what is known of the run is.
    """
    table = tables.command.c
    newest = unit.connection.execute(
        sa.select(tables.command)
        .where(table.run_id == run_id, table.kind == "thin")
        .order_by(table.id.desc())
        .limit(1)
    ).first()
    if newest is not None and not _is_due(unit, newest, asked, late_seconds):
        return False
    command = Asked(
        "thin", num_steps=asked.level, asked_by=_who_asks(asked), late_seconds=late_seconds
    )
    try:
        create(unit, run_id, command)
    except CommandRefusedError:  # the run has just ended
        return False
    return True


def _who_asks(asked: ThinningAsked) -> str:
    if asked.cause == "budget":
        return asked.cause
    if asked.cause == "in time":
        return f"{schema.SHEDDING}in time again"
    by = f" by {asked.behind_seconds:.0f} s" if asked.behind_seconds else ""
    return f"{schema.SHEDDING}behind{by}"


def _is_due(unit: Unit, newest: sa.Row[Any], asked: ThinningAsked, late_seconds: float) -> bool:
    """Return whether ranks had the time to do, and to say, what the newest command asks for."""
    is_shedding = asked.cause != "budget"
    is_same = newest.asked_by.startswith(schema.SHEDDING) and newest.num_steps == asked.level
    if is_shedding and not is_same:
        return True  # the pause between two levels is that of the decision
    pause_ns = _THINNING_PAUSE_NS
    if is_shedding:
        parts = tables.command_rank.c
        of_it = sa.select(parts.rank).where(parts.command_id == newest.id)
        is_refused = unit.connection.scalar(of_it.where(parts.state == "refused").limit(1))
        pause_ns = _SHEDDING_PAUSE_NS if is_refused is None else _REFUSED_PAUSE_NS
    # it is done some margin after it is heard of, and that is said behind all that waits
    return bool(unit.now_ns - newest.created_ns >= pause_ns + int(3e9 * late_seconds))


def ask_for_stacks(unit: Unit, run_id: str, finding_id: int, ranks: list[int]) -> int | None:
    """Ask for stacks of the ranks that a hang names, up to three times; return the command."""
    table, parts = tables.command, tables.command_rank
    rows = unit.connection.execute(
        sa.select(parts.c.rank, sa.func.count(), sa.func.max(table.c.created_ns))
        .join(table, table.c.id == parts.c.command_id)
        .where(table.c.run_id == run_id, table.c.finding_id == finding_id)
        .group_by(parts.c.rank)
    )
    before = {rank: (int(number), int(last)) for rank, number, last in rows}
    taken = unit.connection.scalars(  # the collector took as many by itself, and said so
        sa.select(parts.c.rank)
        .join(table, table.c.id == parts.c.command_id)
        .where(
            table.c.run_id == run_id,
            table.c.finding_id == finding_id,
            parts.c.state == "done",
            parts.c.reason != "",
        )
    ).all()
    due = []
    for rank in ranks[:MAX_INCIDENT_RANKS]:
        number, last = before.get(rank, (0, 0))
        if rank in taken:
            continue
        if number < MAX_PER_INCIDENT and unit.now_ns - last >= INCIDENT_PAUSES_NS[number]:
            due.append(rank)
    if not due:
        return None
    asked = Asked("stacks", due, asked_by=f"finding {finding_id}", finding_id=finding_id)
    try:
        return create(unit, run_id, asked)
    except CommandRefusedError:
        return None  # all of them are gone meanwhile
