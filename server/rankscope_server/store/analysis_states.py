"""What the analysis of a live run knew at a batch, as rows: one, and its large arrays by digest.

Most of a large state is as it was when it was stored before, so an array that is there already is
not written again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import sqlalchemy as sa

from rankscope_server.store import tables
from rankscope_server.store.deletion import OVER
from rankscope_server.store.engine import upsert
from rankscope_server.store.unit import Unit

_AT_ONCE = 500  # keys in one statement


@dataclass(frozen=True, slots=True)
class Kept:
    """A state as it is stored: bytes, and large arrays in their order."""

    last_batch: int
    data: bytes
    parts: list[bytes]


def known_parts(connection: sa.Connection, run_id: str) -> set[str]:
    """Return the digests of the arrays that are stored of a run."""
    table = tables.analysis_part.c
    return set(connection.scalars(sa.select(table.digest).where(table.run_id == run_id)))


def keep(
    unit: Unit,
    run_id: str,
    *,
    code: str,
    last_batch: int,
    data: bytes,
    digests: Sequence[str],
    news: Mapping[str, bytes],
) -> None:
    """Store a state in place of the one before; `news` are the arrays that were not there."""
    table = tables.analysis_part
    gone = sorted(known_parts(unit.connection, run_id) - set(digests))
    for at in range(0, len(gone), _AT_ONCE):
        unit.connection.execute(
            sa.delete(table).where(
                table.c.run_id == run_id, table.c.digest.in_(gone[at : at + _AT_ONCE])
            )
        )
    rows = [{"run_id": run_id, "digest": name, "data": part} for name, part in news.items()]
    upsert(unit.connection, table, rows)
    row = {
        "run_id": run_id, "code": code, "last_batch": last_batch, "saved_ns": unit.now_ns,
        "parts": msgspec.json.encode(digests).decode(), "data": data,
    }  # fmt: skip
    changing = ("code", "last_batch", "saved_ns", "parts", "data")
    upsert(unit.connection, tables.analysis_state, [row], changing)


def find_kept(connection: sa.Connection, run_id: str, code: str) -> Kept | None:
    """Return what was stored of a run by the same code; None where there is none, or not all."""
    state, part = tables.analysis_state.c, tables.analysis_part.c
    row = connection.execute(
        sa.select(state.last_batch, state.data, state.parts).where(
            state.run_id == run_id, state.code == code
        )
    ).first()
    if row is None:
        return None
    digests = msgspec.json.decode(row.parts, type=list[str])
    stored = connection.execute(sa.select(part.digest, part.data).where(part.run_id == run_id))
    by_digest = {digest: bytes(data) for digest, data in stored}
    if not by_digest.keys() >= set(digests):
        return None
    return Kept(int(row.last_batch), bytes(row.data), [by_digest[name] for name in digests])


def forget(unit: Unit, run_id: str) -> None:
    """Remove what is stored of a run."""
    for table in (tables.analysis_state, tables.analysis_part):
        unit.connection.execute(sa.delete(table).where(table.c.run_id == run_id))


def forget_ended(unit: Unit) -> None:
    """Remove what is stored of runs that are over: a server ended before it did so."""
    run = tables.run.c
    over = sa.select(run.run_id).where(run.status.in_(OVER))
    for table in (tables.analysis_state, tables.analysis_part):
        unit.connection.execute(sa.delete(table).where(table.c.run_id.in_(over)))
