"""Commands to ranks: made here, handed out with the answers to batches, answered by records.

A command is open until every rank has answered or its time is over. Handing it out twice does
no harm: collectors know each by its id.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import sqlalchemy as sa

from rankscope.wire import schema
from rankscope.wire.schema import AnyRecord, CommandKind
from rankscope_server.store import tables
from rankscope_server.store.engine import upsert
from rankscope_server.store.unit import Unit

OPEN_STATES = ("pending", "sent", "running")
MAX_OPEN = 8  # commands of people in one run at a time
TRACES_KEPT = 20  # of each run
_LIFETIMES_NS: dict[CommandKind, int] = {
    "stacks": 60 * 10**9,
    "profile": 600 * 10**9,
    "agent_off": 600 * 10**9,
    "agent_on": 600 * 10**9,
    "thin": 30 * 10**9,
}
_MOST_RANKS: dict[CommandKind, int] = {"stacks": 64, "profile": 16}
_LEAST_MARGIN_STEPS = 2
_MARGIN_SECONDS = 6.0  # a command needs 1 to 2 s to every rank, what we know of it is as old
_LATER_STILL = 1.25  # a delay grows until the last collector has heard of it
_encode = msgspec.json.Encoder().encode
_SELECT_OPEN = sa.select(tables.command).where(
    tables.command.c.run_id == sa.bindparam("run_id"),
    tables.command.c.expires_ns > sa.bindparam("now_ns"),
)


class CommandRefusedError(ValueError):
    """This command is not made; the message is the reason, `remedy` what to do."""

    def __init__(self, what: str, field: str, remedy: str) -> None:
        super().__init__(what)
        self.field, self.remedy = field, remedy


@dataclass(frozen=True, slots=True)
class Asked:
    """A request to ranks. No ranks: all; for a profile the first one of each node."""

    kind: CommandKind
    ranks: list[int] = field(default_factory=list)
    num_steps: int = 3  # of a profile; of thinning the level
    asked_by: str = "user"
    finding_id: int | None = None
    # How late all comes that is known here, and that is said from here: of off, on and thinning,
    # which are to be before the same step in all ranks.
    late_seconds: float = 0.0


def create(unit: Unit, run_id: str, asked: Asked) -> int:
    """Store a command and return its id. Raises CommandRefusedError."""
    connection = unit.connection
    run = connection.execute(sa.select(tables.run).where(tables.run.c.run_id == run_id)).one()
    if run.launcher == schema.IMPORTED:
        raise CommandRefusedError(
            "this run was imported: no process of it runs", "run", "ask a run that is recorded live"
        )
    known = _ranks(connection, run_id, run.attempt)
    alive = [rank for rank, row in known.items() if row.ended_ns is None]
    if not alive:
        raise CommandRefusedError("no rank of this run is alive", "ranks", "ask a live run")
    is_users = asked.finding_id is None and asked.kind != "thin"
    if is_users and _num_open(unit, run_id) >= MAX_OPEN:
        raise CommandRefusedError(
            f"{MAX_OPEN} requests of this run are open", "kind", "wait until one is done"
        )
    ranks = asked.ranks or _all_of(asked.kind, known, alive)
    most = _MOST_RANKS.get(asked.kind, len(ranks))
    if len(ranks) > most:
        raise CommandRefusedError(
            f"{len(ranks)} ranks are more than {most} at once", "ranks", "name fewer ranks"
        )
    missing = [rank for rank in ranks if rank not in known]
    if missing:
        raise CommandRefusedError(
            f"no rank {missing[0]} in this attempt", "ranks", f"ranks are 0 to {max(known)}"
        )
    switches = asked.kind in ("agent_off", "agent_on", "thin")
    pace = _steps_per_second(connection, run_id, run.attempt) if switches else 0.0
    ahead_seconds = _MARGIN_SECONDS + _LATER_STILL * asked.late_seconds
    margin = _LEAST_MARGIN_STEPS + int(ahead_seconds * pace)
    lifetime = _LIFETIMES_NS[asked.kind] + (int(2 * margin / pace * 1e9) if pace else 0)
    inserted = connection.execute(
        sa.insert(tables.command).values(
            run_id=run_id, attempt=run.attempt, kind=asked.kind, asked_by=asked.asked_by,
            finding_id=asked.finding_id, created_ns=unit.now_ns,
            expires_ns=unit.now_ns + lifetime,
            num_steps=asked.num_steps if asked.kind in ("profile", "thin") else 0,
            at_step=max(known[rank].step for rank in alive) + margin if switches else 0,
            is_everyone=int(switches and set(alive) <= set(ranks)),
        )
    )  # fmt: skip
    command_id = int(inserted.inserted_primary_key[0])  # type: ignore[index]
    gone = {rank: row.ended_ns is not None for rank, row in known.items()}
    connection.execute(
        sa.insert(tables.command_rank),
        [
            {
                "command_id": command_id, "rank": rank, "updated_ns": unit.now_ns,
                "state": "refused" if gone[rank] else "pending",
                "reason": "the rank has ended" if gone[rank] else "",
            }
            for rank in sorted(set(ranks))
        ],
    )  # fmt: skip
    return command_id


def hand_out(unit: Unit, run_id: str, records: list[AnyRecord]) -> list[schema.Command]:
    """Return the open commands for the ranks whose states a batch brings, and note it."""
    parts = tables.command_rank
    commands = unit.once(
        ("commands", run_id),
        lambda: unit.connection.execute(
            _SELECT_OPEN, {"run_id": run_id, "now_ns": unit.now_ns}
        ).all(),
    )
    if not commands:
        return []
    reporting = {
        (record.attempt, record.rank) for record in records if isinstance(record, schema.RankState)
    }
    found = []
    for command in commands:
        rows = unit.connection.execute(
            sa.select(parts.c.rank, parts.c.state).where(
                parts.c.command_id == command.id, parts.c.state.in_(OPEN_STATES)
            )
        ).all()
        rows = [row for row in rows if (command.attempt, row.rank) in reporting]
        fresh = [row.rank for row in rows if row.state == "pending"]
        for at in range(0, len(fresh), 500):
            unit.connection.execute(
                sa.update(parts)
                .where(parts.c.command_id == command.id, parts.c.rank.in_(fresh[at : at + 500]))
                .values(state="sent", updated_ns=unit.now_ns)
            )
        if rows:
            found.append(_on_the_wire(command, [row.rank for row in rows], unit.now_ns))
    return found


def store_answer(connection: sa.Connection, run_id: str, answer: schema.CommandAnswer) -> bool:
    """Store the answer of a rank to a command; return whether there is such a command."""
    parts = tables.command_rank.c
    if not _belongs(connection, run_id, answer.command):
        return False
    values: dict[str, Any] = {
        "state": answer.state, "reason": answer.reason, "updated_ns": answer.time_ns
    }  # fmt: skip
    if answer.trace_bytes:
        values |= {
            "trace_bytes": answer.trace_bytes,
            "operators": _encode(answer.operators).decode(),
        }
    done = connection.execute(
        sa.update(tables.command_rank)
        .where(parts.command_id == answer.command, parts.rank == answer.rank)
        .values(values)
    )
    return bool(done.rowcount)


def store_part(
    unit: Unit, run_id: str, command_id: int, rank: int, offset: int, total: int, data: bytes
) -> int | None:
    """Store a part of a trace; return how many bytes are there, None if it was not asked for."""
    parts, table = tables.command_rank.c, tables.trace_part
    asked = _belongs(unit.connection, run_id, command_id, "profile") and unit.connection.scalar(
        sa.select(parts.rank).where(parts.command_id == command_id, parts.rank == rank)
    )
    if asked is None or asked is False:
        return None
    mine = (table.c.command_id == command_id) & (table.c.rank == rank)
    if offset == 0:
        unit.connection.execute(sa.delete(table).where(mine))
        _forget_old_traces(unit, run_id, command_id)
    row = {"command_id": command_id, "rank": rank, "offset": offset, "total": total, "data": data}
    upsert(unit.connection, table, [row], ("total", "data"))
    sizes = sa.select(sa.func.sum(sa.func.length(table.c.data))).where(mine)
    return int(unit.connection.scalar(sizes) or 0)


def _forget_old_traces(unit: Unit, run_id: str, command_id: int) -> None:
    """Make room for one more trace: the oldest ones go."""
    table, parts = tables.command.c, tables.trace_part
    stored = unit.connection.execute(
        sa.select(parts.c.command_id, parts.c.rank)
        .where(parts.c.command_id.in_(sa.select(table.id).where(table.run_id == run_id)))
        .distinct()
        .order_by(parts.c.command_id, parts.c.rank)
    ).all()
    for old in stored[: max(0, len(stored) - TRACES_KEPT + 1)]:
        if old.command_id == command_id:
            return
        unit.connection.execute(
            sa.delete(parts).where(parts.c.command_id == old.command_id, parts.c.rank == old.rank)
        )


def _belongs(connection: sa.Connection, run_id: str, command_id: int, kind: str = "") -> bool:
    table = tables.command.c
    found = connection.execute(
        sa.select(table.kind).where(table.id == command_id, table.run_id == run_id)
    ).first()
    return found is not None and kind in ("", found.kind)


def _ranks(connection: sa.Connection, run_id: str, attempt: int) -> dict[int, sa.Row[Any]]:
    table = tables.rank
    rows = connection.execute(
        sa.select(table).where(table.c.run_id == run_id, table.c.attempt == attempt)
    )
    return {row.rank: row for row in rows}


def _all_of(kind: CommandKind, known: dict[int, sa.Row[Any]], alive: list[int]) -> list[int]:
    if kind != "profile":
        return alive
    first: dict[str, int] = {}
    for rank in sorted(alive):
        first.setdefault(known[rank].host, rank)
    return sorted(first.values())


def _num_open(unit: Unit, run_id: str) -> int:
    table, parts = tables.command, tables.command_rank
    return int(
        unit.connection.scalar(
            sa.select(sa.func.count(table.c.id.distinct()))
            .join(parts, parts.c.command_id == table.c.id)
            .where(
                table.c.run_id == run_id,
                table.c.finding_id.is_(None),
                table.c.kind != "thin",
                table.c.expires_ns > unit.now_ns,
                parts.c.state.in_(OPEN_STATES),
            )
        )
        or 0
    )


def _steps_per_second(connection: sa.Connection, run_id: str, attempt: int) -> float:
    """Return the pace of the newest chunk of steps; 0 where there is none."""
    chunk = tables.chunk.c
    newest = connection.execute(
        sa.select(chunk.step_lo, chunk.step_hi, chunk.time_lo_ns, chunk.time_hi_ns)
        .where(chunk.run_id == run_id, chunk.kind == "steps", chunk.attempt == attempt)
        .order_by(chunk.time_hi_ns.desc())
        .limit(1)
    ).first()
    if newest is None or newest.time_hi_ns <= newest.time_lo_ns:
        return 0.0
    num_steps = newest.step_hi - newest.step_lo + 1  # as of one rank, of however many it is
    return float(num_steps / (newest.time_hi_ns - newest.time_lo_ns) * 1e9)


def _on_the_wire(command: sa.Row[Any], ranks: list[int], now_ns: int) -> schema.Command:
    return schema.Command(
        id=command.id,
        kind=command.kind,
        attempt=command.attempt,
        ranks=ranks,
        asked_by=command.asked_by,
        expires_in_seconds=(command.expires_ns - now_ns) / 1e9,
        num_steps=command.num_steps,
        level=command.num_steps if command.kind == "thin" else 0,
        at_step=command.at_step,
        is_everyone=bool(command.is_everyone),
    )
