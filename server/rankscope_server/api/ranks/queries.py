"""The ranks of a run, and one of them in full."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec
import sqlalchemy as sa

from rankscope.wire import schema
from rankscope.wire.backends import is_of_device
from rankscope.wire.group_state import exchanges_of
from rankscope_server.answers import capped, of_row, to_ms
from rankscope_server.api.ranks.chunks import Wanted
from rankscope_server.api.ranks.records import newest
from rankscope_server.api.ranks.schema import (
    GroupRow,
    RankDetail,
    RankRow,
    Ranks,
    RankStatus,
    StackRow,
)
from rankscope_server.api.runs.queries import RANK_HEAD, is_silent, rank_rows
from rankscope_server.findings.finding import SEVERITIES, Severity
from rankscope_server.problems import not_found
from rankscope_server.store import tables
from rankscope_server.text import exit_text

MAX_STACKS = 10
LAST_COLLECTIVES = 50
_decode_state = msgspec.json.Decoder(schema.RankState).decode
_COLUMNS = (
    *RANK_HEAD, "node_rank", "local_rank", "pid", "sources", "state",
)  # fmt: skip


class _Doing(msgspec.Struct):
    """Of `schema.RankState` what a list of ranks shows."""

    phase: str
    phase_since_ns: int
    cpu_seconds: float = 0.0
    rss_bytes: int = 0


_decode_doing = msgspec.json.Decoder(_Doing).decode
# Ranks of one program have the same ones.
_sources = lru_cache(maxsize=1_024)(msgspec.json.Decoder(dict[str, str]).decode)


def ranks(
    connection: sa.Connection,
    run: sa.Row[Any],
    attempt: int | None,
    silent_before_ns: int,
) -> Ranks:
    """Return the ranks of an attempt, by default the newest."""
    number = run.attempt if attempt is None else attempt
    rows = rank_rows(connection, run.run_id, number, _COLUMNS)
    named = _named(connection, run.run_id)
    return Ranks(ranks=[_rank_row(row, run, named, silent_before_ns) for row in rows])


def rank(
    connection: sa.Connection,
    run: sa.Row[Any],
    number: int,
    silent_before_ns: int,
) -> RankDetail:
    """Return one rank of the newest attempt. Raises Problem 404."""
    table = tables.rank
    row = connection.execute(
        sa.select(table).where(
            table.c.run_id == run.run_id, table.c.attempt == run.attempt, table.c.rank == number
        )
    ).first()
    if row is None:
        raise not_found(
            f"no rank {number} in run {run.run_id}", f"ranks are 0 to {run.world_size - 1}", "rank"
        )
    stacks, num_stacks = _stacks(connection, row)
    base = _rank_row(row, run, _named(connection, run.run_id), silent_before_ns)
    return of_row(
        RankDetail,
        row,
        **msgspec.structs.asdict(base),
        num_stages=row.num_stages or None,
        num_microbatches=row.num_microbatches or None,
        groups=_groups(connection, row),
        collectives=newest(connection, Wanted(run.run_id, row.attempt, number), LAST_COLLECTIVES),
        stacks=stacks,
        stacks_capped=capped(len(stacks), num_stacks),
    )


def _rank_row(
    row: sa.Row[Any],
    run: sa.Row[Any],
    named: _Named,
    silent_before_ns: int,
) -> RankRow:
    state = None if row.state is None else _decode_doing(row.state)
    finding = named.by_finding.get((row.attempt, row.rank))
    return of_row(
        RankRow,
        row,
        state=_status(row, run, named.stuck, silent_before_ns),
        phase=state.phase if state else None,
        phase_since_ms=to_ms(state.phase_since_ns) if state else None,
        exit_text=exit_text(row),
        stage=row.stage if row.stage >= 0 else None,
        sources=_sources(row.sources),
        cpu_seconds=state.cpu_seconds if state else None,
        rss_bytes=(state.rss_bytes or None) if state else None,
        finding_id=finding.id if finding else None,
        finding_kind=finding.kind if finding else None,
        finding_severity=finding.severity if finding else None,
        finding_what=finding.what if finding else None,
    )


def _status(
    row: sa.Row[Any],
    run: sa.Row[Any],
    stuck: set[tuple[int, int]],
    silent_before_ns: int,
) -> RankStatus:
    if row.ended_ns is not None:
        return "ended" if row.end_reason == "clean" else "failed"
    is_stuck = (row.attempt, row.rank) in stuck
    if run.launcher == schema.IMPORTED:
        return "stuck" if is_stuck else "ended"
    if is_silent(row, run, silent_before_ns) or run.status in {"ended", "failed"}:
        return "silent"
    return "stuck" if is_stuck else "running"


class _Naming(msgspec.Struct):
    """Of a stored finding what says whom it names, and how grave it is."""

    kind: str
    severity: Severity
    what: str
    ranks: tuple[int, ...] = ()
    victims: tuple[int, ...] = ()
    cost_throughput_ratio: float | None = None
    id: int = 0

    def gravity(self) -> tuple[int, float]:
        """Return what sorts findings, the gravest first."""
        return SEVERITIES.index(self.severity), -(self.cost_throughput_ratio or 0.0)


_decode_naming = msgspec.json.Decoder(_Naming).decode


@dataclass(slots=True)
class _Named:
    """What open findings say of ranks, by (attempt, rank)."""

    stuck: set[tuple[int, int]] = field(default_factory=set)  # named by a hang, or waiting in it
    by_finding: dict[tuple[int, int], _Naming] = field(default_factory=dict)


def _named(connection: sa.Connection, run_id: str) -> _Named:
    table = tables.finding.c
    rows = connection.execute(
        sa.select(table.id, table.attempt, table.body).where(
            table.run_id == run_id, table.state != "recovered"
        )
    )
    found, graver = _Named(), []
    for row in rows:
        finding = _decode_naming(row.body)
        finding.id = row.id
        graver.append((row.attempt, finding))
        if finding.kind == "hang":
            waiting = [*finding.ranks, *finding.victims]
            found.stuck |= {(row.attempt, rank) for rank in waiting}
    graver.sort(key=lambda one: one[1].gravity())
    for attempt, finding in graver:
        for rank in finding.ranks:
            found.by_finding.setdefault((attempt, rank), finding)
    return found


def _groups(connection: sa.Connection, row: sa.Row[Any]) -> list[GroupRow]:
    state = None if row.state is None else _decode_state(row.state)
    positions = {group.group: group for group in state.groups} if state else {}
    table = tables.process_group
    defined = connection.execute(
        sa.select(table)
        .where(table.c.run_id == row.run_id, table.c.attempt == row.attempt)
        .order_by(table.c.group)
    ).all()
    known = {group.group: group for group in defined}
    rows = []
    for name in [*known, *(name for name in positions if name not in known)]:
        members = json.loads(known[name].ranks) if name in known else []
        at = positions.get(name)
        if members and row.rank not in members and at is None:
            continue
        backend = known[name].backend if name in known else ""
        is_reported = at is not None and bool(
            at.ended or at.ends_are_known or not is_of_device(backend)
        )
        rows.append(
            GroupRow(
                group=name,
                description=known[name].description if name in known else "",
                backend=backend,
                ranks=members,
                issued=at.issued if at else None,
                ended=at.ended if at and is_reported else None,
                exchanges=exchanges_of(at) if at else None,
                operation=at.operation if at else "",
                size_bytes=at.size_bytes if at else None,
                issued_ms=to_ms(at.issued_ns) if at else None,
                call_site=at.call_site if at else "",
            )
        )
    return rows


def _stacks(connection: sa.Connection, row: sa.Row[Any]) -> tuple[list[StackRow], int]:
    """Return the newest stacks of a rank, and how many there are."""
    table = tables.stacks
    where = (table.c.run_id == row.run_id, table.c.rank == row.rank, table.c.attempt == row.attempt)
    total = connection.scalar(sa.select(sa.func.count()).select_from(table).where(*where))
    rows = connection.execute(
        sa.select(table).where(*where).order_by(table.c.id.desc()).limit(MAX_STACKS)
    )
    found = [of_row(StackRow, stack, command_id=stack.command_id or None) for stack in rows]
    return found, int(total or 0)
