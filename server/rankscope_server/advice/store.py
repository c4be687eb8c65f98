"""The record of advice: each epoch that was given, and what controllers reported of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec
import sqlalchemy as sa

from rankscope_server.advice.decide import Decision
from rankscope_server.store import tables
from rankscope_server.store.unit import Unit

Outcome: TypeAlias = Literal["done", "refused", "failed", "ignored"]
KEPT = 1_000  # epochs and reports of a run
_encode = msgspec.json.Encoder().encode


def epoch_of(unit: Unit, run_id: str, decision: Decision) -> tuple[int, int]:
    """Return the epoch of advice and since when it is given; other advice is a new one."""
    row = newest(unit.connection, run_id)
    if row is not None and decision_of(row).identity == decision.identity:
        return row.epoch, row.given_ns
    table, epoch = tables.advice, 1 if row is None else row.epoch + 1
    unit.connection.execute(
        sa.insert(table).values(
            run_id=run_id, epoch=epoch, given_ns=unit.now_ns, body=_encode(decision).decode()
        )
    )
    unit.connection.execute(
        sa.delete(table).where(table.c.run_id == run_id, table.c.epoch <= epoch - KEPT)
    )
    return epoch, unit.now_ns


def newest(connection: sa.Connection, run_id: str) -> sa.Row[Any] | None:
    """Return what was given last."""
    return next(iter(given(connection, run_id, 1)), None)


def given(connection: sa.Connection, run_id: str, limit: int) -> Sequence[sa.Row[Any]]:
    """Return what was given, the newest first."""
    table = tables.advice
    return connection.execute(
        sa.select(table).where(table.c.run_id == run_id).order_by(table.c.epoch.desc()).limit(limit)
    ).all()


def decision_of(row: sa.Row[Any]) -> Decision:
    """Return the advice of a row."""
    return msgspec.json.decode(row.body, type=Decision)


def report(
    unit: Unit, run_id: str, epoch: int, controller: str, outcome: Outcome, text: str
) -> bool:
    """Store what a controller did; return whether this epoch was ever given."""
    table, known = tables.advice_report, tables.advice.c
    is_known = unit.connection.scalar(
        sa.select(known.epoch).where(known.run_id == run_id, known.epoch == epoch)
    )
    if is_known is None:
        return False
    unit.connection.execute(
        sa.insert(table).values(
            run_id=run_id, epoch=epoch, time_ns=unit.now_ns, controller=controller,
            outcome=outcome, text=text,
        )
    )  # fmt: skip
    mine = sa.select(table.c.id).where(table.c.run_id == run_id).order_by(table.c.id.desc())
    old = mine.offset(KEPT).limit(KEPT).subquery()
    unit.connection.execute(sa.delete(table).where(table.c.id.in_(sa.select(old.c.id))))
    return True


def reports(connection: sa.Connection, run_id: str, limit: int) -> Sequence[sa.Row[Any]]:
    """Return what controllers reported, the newest first."""
    table = tables.advice_report
    return connection.execute(
        sa.select(table).where(table.c.run_id == run_id).order_by(table.c.id.desc()).limit(limit)
    ).all()
