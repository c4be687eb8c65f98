"""One transaction of the writer: the connection, and what is collected and written once at its end.

Several batches of one transaction often touch the same tile, rollup or block of log lines; each
is read once, changed in memory and written once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import sqlalchemy as sa

from rankscope_server.store.lines import LineWriter
from rankscope_server.store.operations import CommittedSums, OperationWriter
from rankscope_server.store.runs import RunRows
from rankscope_server.store.tiles import CommittedTiles, TileWriter

T = TypeVar("T")


class Unit:
    """What a job may use. Lives for one transaction in the writer thread."""

    def __init__(
        self,
        connection: sa.Connection,
        clock: Callable[[], int] = time.time_ns,
        tiles: CommittedTiles | None = None,
        sums: CommittedSums | None = None,
    ) -> None:
        self.connection = connection
        self.now_ns = clock()
        self.tiles = TileWriter(connection, tiles)
        self.operations = OperationWriter(connection, sums)
        self.lines = LineWriter(connection)
        self._runs: dict[str, RunRows] = {}
        self._read: dict[Hashable, Any] = {}

    def run(self, run_id: str) -> RunRows:
        """Return what batches change about a run."""
        rows = self._runs.get(run_id)
        if rows is None:
            rows = self._runs[run_id] = RunRows(self.connection, run_id, self.now_ns)
        return rows

    def once(self, key: Hashable, read: Callable[[], T]) -> T:
        """Return what was read under a key before in this transaction, else read it now."""
        if key not in self._read:
            self._read[key] = read()
        found: T = self._read[key]
        return found

    def read_again(self) -> None:
        """Forget what was read: it was changed."""
        self._read.clear()

    def flush(self) -> None:
        """Write what was collected; the last act before the commit."""
        for run in self._runs.values():
            run.flush()
        self.tiles.flush()
        self.operations.flush()
        self.lines.flush()

    def committed(self) -> None:
        """Take note that all of it is in the store."""
        self.tiles.committed()
        self.operations.committed()

    def forget(self, run_id: str) -> None:
        """Forget what memory holds of a run that is deleted."""
        self.tiles.forget(run_id)
        self.operations.forget(run_id)
