"""Kinds of log lines: each attempt, rank, level, logger and stream that a run has, by a number.

A block counts its lines by their kinds. A filter looks at the kinds, of which a run has some
thousands, and no more at lines.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from rankscope_server.store import tables

COLUMNS = ("attempt", "rank", "level", "logger", "stream", "has_step")
Kind: TypeAlias = tuple[int, int, int, int, int, int]  # as COLUMNS; logger and stream are words
Array = np.ndarray[Any, np.dtype[Any]]
_TABLE = tables.log_kind
_KEY = [_TABLE.c[name] for name in COLUMNS]
_MANY = 500  # SQLite bounds the number of parameters


class KindNumbers:
    """Gives kinds their numbers, new ones where they have none; for one transaction."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection
        self._known: dict[tuple[str, Kind], int] = {}

    def of(self, run_id: str, kinds: list[Kind]) -> list[int]:
        """Return the number of each kind."""
        if unknown := {kind for kind in kinds if (run_id, kind) not in self._known}:
            self._read(run_id, unknown)
        if fresh := sorted(kind for kind in unknown if (run_id, kind) not in self._known):
            is_sqlite = self._connection.dialect.name == "sqlite"
            insert: Any = sqlite.insert if is_sqlite else postgresql.insert
            statement = insert(_TABLE).on_conflict_do_nothing(
                index_elements=[_TABLE.c.run_id, *_KEY]
            )
            rows = [{"run_id": run_id, **dict(zip(COLUMNS, kind, strict=True))} for kind in fresh]
            self._connection.execute(statement, rows)
            self._read(run_id, set(fresh))
        return [self._known[run_id, kind] for kind in kinds]

    def _read(self, run_id: str, kinds: set[Kind]) -> None:
        ranks = sorted({kind[1] for kind in kinds})
        attempts = sorted({kind[0] for kind in kinds})
        for at in range(0, len(ranks), _MANY):
            rows = self._connection.execute(
                sa.select(_TABLE.c.id, *_KEY).where(
                    _TABLE.c.run_id == run_id,
                    _TABLE.c.attempt.in_(attempts),
                    _TABLE.c.rank.in_(ranks[at : at + _MANY]),
                )
            )
            self._known.update({(run_id, tuple(kind)): number for number, *kind in rows})


class Kinds:
    """The kinds that a search has met, read as it meets them."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection
        self.rows = np.zeros((0, len(COLUMNS)), np.int64)  # one for each kind, columns as COLUMNS
        self._places = np.full(1, -1, np.int32)  # of each number its row

    def places(self, numbers: Array) -> Array:
        """Return the row of each number."""
        most = int(numbers.max(initial=0))
        if most >= len(self._places):
            more = np.full(most + 1 - len(self._places), -1, np.int32)
            self._places = np.concatenate([self._places, more])
        places = self._places[numbers]
        if (places < 0).any():
            self._read(np.unique(numbers[places < 0]).tolist())
            places = self._places[numbers]
        return places

    def _read(self, numbers: list[int]) -> None:
        for at in range(0, len(numbers), _MANY):
            rows = self._connection.execute(
                sa.select(_TABLE.c.id, *_KEY).where(_TABLE.c.id.in_(numbers[at : at + _MANY]))
            ).all()
            found = np.array([tuple(row) for row in rows], np.int64).reshape(-1, len(COLUMNS) + 1)
            self._places[found[:, 0]] = len(self.rows) + np.arange(len(found))
            self.rows = np.concatenate([self.rows, found[:, 1:]])
