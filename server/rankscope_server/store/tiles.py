"""The rollup of steps: per metric, 64 steps by up to 64 ranks as one small array.

Missing cells are NaN (float metrics) or 0 (`started_ns`). A step that is sent twice is stored once;
of a step that a rank ran twice in one attempt the later one counts, whichever comes first.

A tile is written again with every few steps, until all of its steps are there. Where no other
process writes, the newest ones stay in memory as they were committed: they are not read again.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import sqlalchemy as sa

from rankscope.wire.arrays import distinct
from rankscope.wire.chunk import Column
from rankscope_server.ingest.step_metrics import BLOCK_STEPS, FLOAT_METRICS, STARTED, Array
from rankscope_server.store import tables
from rankscope_server.store.committed import Committed
from rankscope_server.store.engine import upsert
from rankscope_server.store.packing import pack_array, unpack_array

BLOCK_RANKS = 64
_ALL_STEPS = slice(0, BLOCK_STEPS)

TileKey = tuple[str, int, int, int]  # run, attempt, step block, rank block

METRICS = (*FLOAT_METRICS, STARTED)


def dtype_of(metric: str) -> np.dtype[Any]:
    """Return the type that the cells of a metric have."""
    return np.dtype("<i8") if metric == STARTED else np.dtype("<f4")


_SELECT_TILES = sa.select(tables.step_tile.c.metric, tables.step_tile.c.data).where(
    tables.step_tile.c.run_id == sa.bindparam("run_id"),
    tables.step_tile.c.metric.in_(METRICS),
    tables.step_tile.c.step_block == sa.bindparam("step_block"),
    tables.step_tile.c.rank_block == sa.bindparam("rank_block"),
    tables.step_tile.c.attempt == sa.bindparam("attempt"),
)


@dataclass(frozen=True, slots=True)
class _Cells:
    """Some metrics at some steps of one rank, or of the rank of each; arrays of one length."""

    rank: int | Array
    steps: Array
    values: Mapping[str, Array]


CommittedTiles: TypeAlias = Committed[TileKey, dict[str, Array]]


def committed_tiles(most_bytes: int = 32 << 20) -> CommittedTiles:
    """Return room for the newest tiles."""
    return Committed(lambda known: sum(tile.nbytes for tile in known.values()), most_bytes)


class TileWriter:
    """Collects cells for one transaction."""

    def __init__(self, connection: sa.Connection, committed: CommittedTiles | None = None) -> None:
        """`committed` is None where other processes may write tiles, too."""
        self._connection, self._committed = connection, committed
        self._written: dict[TileKey, dict[str, Array]] = {}
        # by run, attempt and the metrics that are given
        self._cells: dict[tuple[str, int, tuple[str, ...]], list[_Cells]] = {}

    def add(
        self,
        run_id: str,
        attempt: int,
        rank: Column | int,
        steps: Array,
        values: Mapping[str, Array],
    ) -> None:
        """Put the values of one rank at `steps` (1-based), of some metrics, into their tiles.

        `rank` may be an array as `steps` is: the rank of each of them.
        """
        cells = _Cells(rank if isinstance(rank, int) else np.asarray(rank), steps, values)
        self._cells.setdefault((run_id, attempt, tuple(values)), []).append(cells)

    def forget(self, run_id: str) -> None:
        """Forget what is known of a run that is deleted."""
        if self._committed is not None:
            self._committed.forget(run_id)

    def committed(self) -> None:
        """Take note that what `flush` wrote is in the store."""
        if self._committed is not None:
            self._committed.put(self._written)

    def flush(self) -> None:
        """Write every tile that changed."""
        tiles: dict[TileKey, dict[str, Array]] = {}
        for (run_id, attempt, metrics), cells in self._cells.items():
            ranks = np.concatenate([np.broadcast_to(c.rank, len(c.steps)) for c in cells])
            steps = np.concatenate([c.steps for c in cells])
            values = {name: np.concatenate([c.values[name] for c in cells]) for name in metrics}
            wide = int(ranks.max()) // BLOCK_RANKS + 1  # blocks of ranks
            blocks = steps // BLOCK_STEPS * wide + ranks // BLOCK_RANKS
            for block in distinct(blocks).tolist():
                inside = np.flatnonzero(blocks == block)
                step_block, rank_block = divmod(block, wide)
                lines, columns = ranks[inside] % BLOCK_RANKS, steps[inside] % BLOCK_STEPS
                key = (run_id, attempt, step_block, rank_block)
                known = self._tiles_of(tiles, key, int(lines.max()))
                if STARTED in values:  # a rank that ran a step twice: the later start stays
                    started = values[STARTED][inside]
                    order = np.argsort(started, kind="stable")
                    order = order[started[order] >= known[STARTED][lines[order], columns[order]]]
                    inside, lines, columns = inside[order], lines[order], columns[order]
                for name in metrics:  # of a cell that is written twice the later value stays
                    known[name][lines, columns] = values[name][inside]
        self._cells.clear()
        rows = [
            {
                "run_id": run_id, "attempt": attempt, "metric": metric, "step_block": step_block,
                "rank_block": rank_block, "data": pack_array(tile),
            }
            for (run_id, attempt, step_block, rank_block), known in tiles.items()
            for metric, tile in known.items()
        ]  # fmt: skip
        upsert(self._connection, tables.step_tile, rows, ("data",))
        self._written = tiles

    def _tiles_of(
        self, tiles: dict[TileKey, dict[str, Array]], key: TileKey, row: int
    ) -> dict[str, Array]:
        known = tiles.get(key)
        if known is None and self._committed is not None:
            known = self._committed.take(key)
        if known is None:
            known = self._read(key)
        tiles[key] = known
        for metric, tile in known.items():
            if len(tile) <= row:
                known[metric] = np.concatenate([tile, _missing(metric, row + 1 - len(tile))])
        return known

    def _read(self, key: TileKey) -> dict[str, Array]:
        names = ("run_id", "attempt", "step_block", "rank_block")
        found = self._connection.execute(_SELECT_TILES, dict(zip(names, key, strict=True)))
        known = {metric: _missing(metric, 0) for metric in METRICS}
        return known | {metric: _rows(data, metric) for metric, data in found}


def read_blocks(
    connection: sa.Connection,
    run_id: str,
    metrics: tuple[str, ...],
    step_lo: int,
    step_hi: int,
    only_attempt: int | None = None,
    rank_blocks: Collection[int] | None = None,
) -> Iterator[tuple[int, dict[str, Array]]]:
    """Yield (first step, {metric: ranks by at most 64 steps}) of each stored block, in their order.

    Only steps `step_lo`..`step_hi` are in them; arrays of one block have one shape. Of a step that
    several attempts ran, all metrics are those of the newest, unless one attempt is asked for. With
    `rank_blocks` only those blocks of ranks are read; what is between them is missing.
    """
    table, attempts = tables.step_tile.c, tables.attempt.c
    num_attempts = connection.scalar(
        sa.select(sa.func.count()).select_from(tables.attempt).where(attempts.run_id == run_id)
    )
    read = metrics if STARTED in metrics or (num_attempts or 0) < 2 else (*metrics, STARTED)
    rows = connection.execute(
        sa.select(table.step_block, table.attempt, table.rank_block, table.metric, table.data)
        .where(
            table.run_id == run_id,
            table.metric.in_(read),
            table.step_block.between(step_lo // BLOCK_STEPS, step_hi // BLOCK_STEPS),
            sa.true() if only_attempt is None else table.attempt == only_attempt,
            sa.true() if rank_blocks is None else table.rank_block.in_(rank_blocks),
        )
        .order_by(table.step_block, table.attempt)
    )
    for step_block, stored in itertools.groupby(rows, key=lambda row: row.step_block):
        first = step_block * BLOCK_STEPS
        begin = max(step_lo - first, 0)
        steps = slice(begin, max(begin, min(step_hi + 1 - first, BLOCK_STEPS)))
        parts = [
            _Part(row.attempt, row.rank_block, row.metric, _steps_of(row.data, row.metric, steps))
            for row in stored
        ]
        yield first + begin, _assemble(metrics, parts)


class _Part(NamedTuple):
    """One stored tile of a block of steps."""

    attempt: int
    rank_block: int
    metric: str
    tile: Array

    def rows_of(self, plane: Array) -> Array:
        """Return the rows of a plane that the tile is about."""
        lo = self.rank_block * BLOCK_RANKS
        return plane[lo : lo + len(self.tile)]


def _assemble(metrics: tuple[str, ...], parts: list[_Part]) -> dict[str, Array]:
    """Return the planes of a block from its tiles, those of later attempts last."""
    height = max(part.rank_block * BLOCK_RANKS + len(part.tile) for part in parts)
    width = parts[0].tile.shape[1]
    planes = {metric: _missing(metric, height, width) for metric in metrics}
    first = parts[0].attempt
    for attempt, tiles in itertools.groupby(parts, key=lambda part: part.attempt):
        of_attempt = list(tiles)
        if attempt != first:
            _forget_run_again(planes, of_attempt)
        for part in of_attempt:
            if part.metric in planes:
                known = part.tile != 0 if part.metric == STARTED else ~np.isnan(part.tile)
                np.copyto(part.rows_of(planes[part.metric]), part.tile, where=known)
    return planes


def _forget_run_again(planes: dict[str, Array], parts: list[_Part]) -> None:
    """Make cells of steps missing that this attempt ran, too: none of its own is mixed in."""
    for part in parts:
        if part.metric == STARTED:
            for metric, plane in planes.items():
                part.rows_of(plane)[part.tile != 0] = 0 if metric == STARTED else np.nan


def _rows(data: bytes, metric: str) -> Array:
    return unpack_array(data, dtype_of(metric)).reshape(-1, BLOCK_STEPS)


def _steps_of(data: bytes, metric: str, steps: slice) -> Array:
    """Return some steps of a stored tile; of others nothing stays in memory."""
    tile = _rows(data, metric)
    return tile if steps == _ALL_STEPS else tile[:, steps].copy()


def _missing(metric: str, rows: int, steps: int = BLOCK_STEPS) -> Array:
    return np.full((rows, steps), 0 if metric == STARTED else np.nan, dtype_of(metric))
