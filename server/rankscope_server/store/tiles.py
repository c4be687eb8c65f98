"""The rollup of steps: per metric, 64 steps by up to 64 ranks as one small array.

Missing cells are NaN (float metrics) or 0 (`started_ns`). A later chunk of the same rank and
step replaces the cell: a step that is sent twice is stored once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope.wire.backends import HOST_WAITS_RATIO
from rankscope.wire.chunk import Column
from rankscope.wire.metric_names import GPU_SECONDS, GPU_WAIT_SECONDS
from rankscope.wire.schema import STEP_WAITS_UNKNOWN
from rankscope_server.store import tables
from rankscope_server.store.engine import upsert
from rankscope_server.store.packing import pack_array, unpack_array

BLOCK_STEPS = 64
BLOCK_RANKS = 64
MAX_BLOCKS_PER_CHUNK = 512

Array = np.ndarray[Any, np.dtype[Any]]
TileKey = tuple[str, int, int, int]  # run, attempt, step block, rank block

_MS = 1e-6
PHASE_METRICS = ("data", "forward", "backward", "optimizer", "checkpoint", "evaluation", "other")
BLOCKED_METRICS = ("forward_blocked", "backward_blocked", "optimizer_blocked", "other_blocked")
# In milliseconds: `own_work` is the step without waiting for peers, `blocked` is that waiting.
FLOAT_METRICS = (
    "own_work", "step", "blocked", "cpu", *PHASE_METRICS, *BLOCKED_METRICS,
    "microbatches", "num_collectives", "flags",
)  # fmt: skip
# What only its device knows of a rank whose host enqueues what the device does.
DEVICE_METRICS = ("own_work", "blocked", *PHASE_METRICS, *BLOCKED_METRICS)
_MS_PER_S = 1e3
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
    unseen = (numbers["flags"].astype(np.int64) & STEP_WAITS_UNKNOWN) != 0
    values["own_work"][unseen] = values["blocked"][unseen] = np.nan  # not 0
    for name in ("microbatches", "num_collectives", "flags"):
        values[name] = numbers[name].astype("<f4")
    values[STARTED] = np.maximum(numbers["started_ns"], 0)
    return values


def known_to_host(values: dict[str, Array]) -> dict[str, Array]:
    """Return of the metrics of a rank on a device what its host knows of these steps."""
    with np.errstate(invalid="ignore", divide="ignore"):
        waited = values["blocked"] / values["step"]
    if np.sum(waited > HOST_WAITS_RATIO) * 2 > len(waited):
        return values
    return {name: cells for name, cells in values.items() if name not in DEVICE_METRICS}


def metrics_of_device(values: Mapping[str, float]) -> dict[str, Array]:
    """Return the metrics of one step that a device measured; empty where its waits are not known.

    `values` are numbers by name, as in `rankscope.wire.metric_names`.
    """
    names = (*GPU_SECONDS.values(), *GPU_WAIT_SECONDS.values())
    is_known = any(name in values for name in GPU_WAIT_SECONDS.values())
    if not is_known or not all(math.isfinite(values.get(name, 0.0)) for name in names):
        return {}
    cells = {phase: values.get(name, 0.0) * _MS_PER_S for phase, name in GPU_SECONDS.items()}
    for phase, name in GPU_WAIT_SECONDS.items():
        blocked_in = f"{phase}_blocked"
        if blocked_in not in BLOCKED_METRICS:
            blocked_in = "other_blocked"
        cells[blocked_in] = cells.get(blocked_in, 0.0) + values.get(name, 0.0) * _MS_PER_S
    blocked = sum(cells[name] for name in BLOCKED_METRICS)
    cells["blocked"] = blocked
    cells["own_work"] = max(sum(cells[phase] for phase in PHASE_METRICS) - blocked, 0.0)
    return {name: np.array([cell], "<f4") for name, cell in cells.items()}


_SELECT_TILES = sa.select(tables.step_tile.c.metric, tables.step_tile.c.data).where(
    tables.step_tile.c.run_id == sa.bindparam("run_id"),
    tables.step_tile.c.metric.in_(METRICS),
    tables.step_tile.c.step_block == sa.bindparam("step_block"),
    tables.step_tile.c.rank_block == sa.bindparam("rank_block"),
    tables.step_tile.c.attempt == sa.bindparam("attempt"),
)


class TileWriter:
    """Gathers cells for one transaction."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection
        self._tiles: dict[TileKey, dict[str, Array]] = {}

    def add(
        self, run_id: str, attempt: int, rank: int, steps: Array, values: dict[str, Array]
    ) -> None:
        """Put the values of one rank at `steps` (1-based), of some metrics, into their tiles."""
        rank_block, row = divmod(rank, BLOCK_RANKS)
        blocks = steps // BLOCK_STEPS
        for block in np.unique(blocks).tolist():
            inside = blocks == block
            columns = steps[inside] % BLOCK_STEPS
            tiles = self._tiles_of((run_id, attempt, block, rank_block), row)
            for metric, cells in values.items():
                tiles[metric][row, columns] = cells[inside]

    def flush(self) -> None:
        """Write every tile that changed."""
        rows = [
            {
                "run_id": run_id, "attempt": attempt, "metric": metric, "step_block": step_block,
                "rank_block": rank_block, "data": pack_array(tile),
            }
            for (run_id, attempt, step_block, rank_block), tiles in self._tiles.items()
            for metric, tile in tiles.items()
        ]  # fmt: skip
        upsert(self._connection, tables.step_tile, rows, ("data",))
        self._tiles.clear()

    def _tiles_of(self, key: TileKey, row: int) -> dict[str, Array]:
        tiles = self._tiles.get(key)
        if tiles is None:
            names = ("run_id", "attempt", "step_block", "rank_block")
            found = self._connection.execute(_SELECT_TILES, dict(zip(names, key, strict=True)))
            tiles = {metric: _missing(metric, 0) for metric in METRICS}
            tiles |= {metric: _rows(data, metric) for metric, data in found}
            self._tiles[key] = tiles
        for metric, tile in tiles.items():
            if len(tile) <= row:
                tiles[metric] = np.concatenate([tile, _missing(metric, row + 1 - len(tile))])
        return tiles


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
