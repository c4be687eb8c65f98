"""The rollup of steps: per metric, 64 steps by up to 64 ranks as one small array.

Missing cells are NaN (float metrics) or 0 (`started_ns`). A later chunk of the same rank and
step replaces the cell: a step that is sent twice is stored once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope_server.ingest.step_metrics import BLOCK_STEPS, FLOAT_METRICS, STARTED, Array
from rankscope_server.store import tables
from rankscope_server.store.engine import upsert
from rankscope_server.store.packing import pack_array, unpack_array

BLOCK_RANKS = 64

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
    """Some metrics of one rank at some steps; arrays of one length."""

    rank: int
    steps: Array
    values: Mapping[str, Array]


class TileWriter:
    """Collects cells for one transaction."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection
        # by run, attempt and the metrics that are given
        self._cells: dict[tuple[str, int, tuple[str, ...]], list[_Cells]] = {}

    def add(
        self, run_id: str, attempt: int, rank: int, steps: Array, values: Mapping[str, Array]
    ) -> None:
        """Put the values of one rank at `steps` (1-based), of some metrics, into their tiles."""
        cells = _Cells(rank, steps, values)
        self._cells.setdefault((run_id, attempt, tuple(values)), []).append(cells)

    def flush(self) -> None:
        """Write every tile that changed."""
        tiles: dict[TileKey, dict[str, Array]] = {}
        for (run_id, attempt, metrics), cells in self._cells.items():
            ranks = np.repeat([c.rank for c in cells], [len(c.steps) for c in cells])
            steps = np.concatenate([c.steps for c in cells])
            values = {name: np.concatenate([c.values[name] for c in cells]) for name in metrics}
            blocks = np.stack([steps // BLOCK_STEPS, ranks // BLOCK_RANKS], axis=1)
            for step_block, rank_block in np.unique(blocks, axis=0).tolist():
                inside = np.flatnonzero((blocks == (step_block, rank_block)).all(axis=1))
                lines, columns = ranks[inside] % BLOCK_RANKS, steps[inside] % BLOCK_STEPS
                key = (run_id, attempt, step_block, rank_block)
                known = self._tiles_of(tiles, key, int(lines.max()))
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

    def _tiles_of(
        self, tiles: dict[TileKey, dict[str, Array]], key: TileKey, row: int
    ) -> dict[str, Array]:
        known = tiles.get(key)
        if known is None:
            names = ("run_id", "attempt", "step_block", "rank_block")
            found = self._connection.execute(_SELECT_TILES, dict(zip(names, key, strict=True)))
            known = {metric: _missing(metric, 0) for metric in METRICS}
            known |= {metric: _rows(data, metric) for metric, data in found}
            tiles[key] = known
        for metric, tile in known.items():
            if len(tile) <= row:
                known[metric] = np.concatenate([tile, _missing(metric, row + 1 - len(tile))])
        return known


def read_blocks(
    connection: sa.Connection, run_id: str, metrics: tuple[str, ...], step_lo: int, step_hi: int
) -> Iterator[tuple[int, dict[str, Array]]]:
    """Yield (first step, {metric: ranks by 64 steps}) of each stored block, in order of steps.

    Arrays of one block have one height. Where attempts overlap the newest one counts.
    """
    table = tables.step_tile.c
    rows = connection.execute(
        sa.select(table.step_block, table.rank_block, table.metric, table.data)
        .where(
            table.run_id == run_id,
            table.metric.in_(metrics),
            table.step_block.between(step_lo // BLOCK_STEPS, step_hi // BLOCK_STEPS),
        )
        .order_by(table.step_block, table.attempt)
    )
    current: int | None = None
    parts: list[tuple[int, str, Array]] = []
    for step_block, rank_block, metric, data in rows:
        if current is not None and step_block != current:
            yield current * BLOCK_STEPS, _assemble(metrics, parts)
            parts = []
        current = step_block
        parts.append((rank_block, metric, _rows(data, metric)))
    if current is not None:
        yield current * BLOCK_STEPS, _assemble(metrics, parts)


def _assemble(metrics: tuple[str, ...], parts: list[tuple[int, str, Array]]) -> dict[str, Array]:
    height = max(block * BLOCK_RANKS + len(tile) for block, _, tile in parts)
    planes = {metric: _missing(metric, height) for metric in metrics}
    for block, metric, tile in parts:
        lo = block * BLOCK_RANKS
        part = planes[metric][lo : lo + len(tile)]
        known = tile != 0 if metric == STARTED else ~np.isnan(tile)
        part[known] = tile[known]
    return planes


def _rows(data: bytes, metric: str) -> Array:
    return unpack_array(data, dtype_of(metric)).reshape(-1, BLOCK_STEPS)


def _missing(metric: str, rows: int) -> Array:
    dtype = dtype_of(metric)
    return np.full((rows, BLOCK_STEPS), 0 if metric == STARTED else np.nan, dtype)
