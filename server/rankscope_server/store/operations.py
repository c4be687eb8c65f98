"""The rollup of collectives: per operation, group and size a count, a sum and a histogram.

Durations fall into 256 bins, eight to each doubling from a microsecond on: a percentile
read from them is at most 9 % above the true one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import sqlalchemy as sa

from rankscope_server.ingest.operations import (
    CallDurations,
    OperationKey,
    OperationSum,
    sum_collectives,
)
from rankscope_server.store import tables
from rankscope_server.store.committed import Committed
from rankscope_server.store.engine import upsert
from rankscope_server.store.packing import pack_array, unpack_array

_ROWS = 200  # of one question: SQLite bounds the number of parameters
_BYTES_PER_SUM = 3_000  # a histogram and the rest
SumKey: TypeAlias = tuple[str, int, OperationKey]  # run, attempt
CommittedSums: TypeAlias = Committed[SumKey, OperationSum]


def committed_sums(most_bytes: int = 8 << 20) -> CommittedSums:
    """Return room for the newest sums."""
    return Committed(lambda known: _BYTES_PER_SUM, most_bytes)


class OperationWriter:
    """Collects collectives for one transaction."""

    def __init__(self, connection: sa.Connection, committed: CommittedSums | None = None) -> None:
        """`committed` is None where other processes may write sums, too."""
        self._connection, self._committed = connection, committed
        self._chunks: dict[tuple[str, int], list[CallDurations]] = {}
        self._written: dict[SumKey, OperationSum] = {}

    def add(self, run_id: str, attempt: int, chunk: CallDurations) -> None:
        """Take one chunk."""
        self._chunks.setdefault((run_id, attempt), []).append(chunk)

    def flush(self) -> None:
        """Add what was collected to the rows."""
        rows = []
        for (run_id, attempt), chunks in self._chunks.items():
            sums = sum_collectives(chunks)
            for key, stored in self._known(run_id, attempt, list(sums)):
                sums[key].add(stored)
            self._written |= {(run_id, attempt, key): value for key, value in sums.items()}
            rows += [
                {
                    "run_id": run_id, "attempt": attempt, **key._asdict(), "count": value.count,
                    "open": value.open, "sum_ns": value.sum_ns, "min_ns": value.min_ns,
                    "max_ns": value.max_ns, "blocked_ns": value.blocked_ns,
                    "histogram": pack_array(value.histogram),
                }
                for key, value in sums.items()
            ]  # fmt: skip
        names = ("count", "open", "sum_ns", "min_ns", "max_ns", "blocked_ns", "histogram")
        upsert(self._connection, tables.op_rollup, rows, names)
        self._chunks.clear()

    def forget(self, run_id: str) -> None:
        """Forget what is known of a run that is deleted."""
        if self._committed is not None:
            self._committed.forget(run_id)

    def committed(self) -> None:
        """Take note that what `flush` wrote is in the store."""
        if self._committed is not None:
            self._committed.put(self._written)

    def _known(
        self, run_id: str, attempt: int, keys: list[OperationKey]
    ) -> Iterator[tuple[OperationKey, OperationSum]]:
        """Yield the sums that are stored, of memory where they are there."""
        unknown = []
        for key in keys:
            place = (run_id, attempt, key)
            known = None if self._committed is None else self._committed.take(place)
            if known is not None:
                yield key, known
            else:
                unknown.append(key)
        yield from self._stored(run_id, attempt, unknown)

    def _stored(
        self, run_id: str, attempt: int, keys: list[OperationKey]
    ) -> Iterator[tuple[OperationKey, OperationSum]]:
        for at in range(0, len(keys), _ROWS):
            chosen = {"run": run_id, "number": attempt, "keys": keys[at : at + _ROWS]}
            for row in self._connection.execute(_SELECT_SUMS, chosen):
                yield OperationKey(row.operation, row.group, row.size_bytes), sum_of_row(row)


_SUM = tables.op_rollup.c
_SELECT_SUMS = sa.select(tables.op_rollup).where(
    _SUM.run_id == sa.bindparam("run"),
    _SUM.attempt == sa.bindparam("number"),
    sa.tuple_(_SUM.operation, _SUM.group, _SUM.size_bytes).in_(
        sa.bindparam("keys", expanding=True)
    ),
)


def sum_of_row(row: sa.Row[Any]) -> OperationSum:
    """Return the sum that a row of `op_rollup` holds."""
    result = OperationSum()
    for name in ("count", "open", "sum_ns", "min_ns", "max_ns", "blocked_ns"):
        setattr(result, name, getattr(row, name) if name != "count" else row._mapping["count"])
    result.histogram = unpack_array(row.histogram, np.dtype("<i8"))
    return result
