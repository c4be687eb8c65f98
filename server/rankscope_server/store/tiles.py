"""The rollup of steps: per metric, 64 steps by up to 64 ranks as one small array.

Missing cells are NaN (float metrics) or 0 (`started_ns`). A later chunk of the same rank and
step replaces the cell: a step that is sent twice is stored once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope.chunk import Column
from rankscope_server import tables
from rankscope_server.store.engine import upsert
from rankscope_server.store.packing import pack_array, unpack_array

BLOCK_STEPS = 64
BLOCK_RANKS = 64
MAX_BLOCKS_PER_CHUNK = 512

Array = np.ndarray[Any, np.dtype[Any]]
TileKey = tuple[str, int, str, int, int]  # run, attempt, metric, step block, rank block

_MS = 1e-6
PHASE_METRICS = ("data", "forward", "backward", "optimizer", "checkpoint", "evaluation", "other")
BLOCKED_METRICS = ("forward_blocked", "backward_blocked", "optimizer_blocked", "other_blocked")
# In milliseconds: `own_work` is the step without waiting for peers, `blocked` is that waiting.
FLOAT_METRICS = (
    "own_work", "step", "blocked", "cpu", *PHASE_METRICS, *BLOCKED_METRICS,
    "microbatches", "num_collectives", "flags",
)  # fmt: skip
STARTED = "started_ns"
METRICS = (*FLOAT_METRICS, STARTED)


def dtype_of(metric: str) -> np.dtype[Any]:
    """Return the type that the cells of a metric have."""
    return np.dtype("<i8") if metric == STARTED else np.dtype("<f4")


def metrics_of_steps(columns: dict[str, Column]) -> dict[str, Array]:
    """Return the values of every metric, one per event of a decoded chunk of steps."""
    numbers = {name: np.asarray(values) for name, values in columns.items()}

    def ms(name: str) -> Array:
        values = numbers[name]
        return np.where(values < 0, np.nan, values * _MS).astype("<f4")

    values: dict[str, Array] = {"step": ms("duration_ns"), "cpu": ms("cpu_ns")}
    for name in (*PHASE_METRICS, *BLOCKED_METRICS):
        values[name] = ms(f"{name}_ns")
    blocked = np.nansum([values[name] for name in BLOCKED_METRICS], axis=0).astype("<f4")
    values["blocked"] = np.where(np.isnan(values["step"]), np.nan, blocked).astype("<f4")
    values["own_work"] = np.maximum(values["step"] - values["blocked"], 0).astype("<f4")
    for name in ("microbatches", "num_collectives", "flags"):
        values[name] = numbers[name].astype("<f4")
    values[STARTED] = np.maximum(numbers["started_ns"], 0)
    return values


class TileWriter:
    """Gathers cells for one transaction."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection
        self._tiles: dict[TileKey, Array] = {}

    def add(
        self, run_id: str, attempt: int, rank: int, steps: Array, values: dict[str, Array]
    ) -> None:
        """Put the values of one rank at `steps` (1-based) into their tiles."""
        rank_block, row = divmod(rank, BLOCK_RANKS)
        blocks = steps // BLOCK_STEPS
        for block in np.unique(blocks).tolist():
            inside = blocks == block
            columns = steps[inside] % BLOCK_STEPS
            for metric in METRICS:
                key = (run_id, attempt, metric, block, rank_block)
                self._tile(key, row)[row, columns] = values[metric][inside]

    def flush(self) -> None:
        """Write every tile that changed."""
        upsert(
            self._connection,
            tables.step_tile,
            [
                {
                    "run_id": run_id, "attempt": attempt, "metric": metric,
                    "step_block": step_block, "rank_block": rank_block, "data": pack_array(tile),
                }
                for (run_id, attempt, metric, step_block, rank_block), tile in self._tiles.items()
            ],
            ("data",),
        )  # fmt: skip
        self._tiles.clear()

    def _tile(self, key: TileKey, row: int) -> Array:
        tile = self._tiles.get(key)
        if tile is None:
            tile = self._load(key)
        if len(tile) <= row:
            tile = np.concatenate([tile, _missing(key[2], row + 1 - len(tile))])
        self._tiles[key] = tile
        return tile

    def _load(self, key: TileKey) -> Array:
        table = tables.step_tile.c
        run_id, attempt, metric, step_block, rank_block = key
        data = self._connection.scalar(
            sa.select(table.data).where(
                table.run_id == run_id,
                table.metric == metric,
                table.step_block == step_block,
                table.rank_block == rank_block,
                table.attempt == attempt,
            )
        )
        return _missing(metric, 0) if data is None else _rows(data, metric)


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
