"""Columns of collectives and chunks, as collectors send them, from what importers read."""

from __future__ import annotations

import numpy as np

from rankscope.wire import schema
from rankscope.wire.chunk import Column, encode_chunk

_TIMES = {"steps": "started_ns", "collectives": "arrived_ns"}


def collective_columns(count: int, unknown: int = -1) -> dict[str, Column]:
    """Return the columns of so many collectives of which nothing is known yet."""
    return {
        name: [""] * count if name in schema.STRING_COLUMNS else np.full(count, unknown, np.int64)
        for name in schema.COLLECTIVE_COLUMNS
    }


def chunk_of(
    kind: schema.ChunkKind, rank: int, columns: dict[str, Column], host: str = "",
    attempt: int = 0,
) -> schema.Chunk:  # fmt: skip
    """Return a chunk with these columns."""
    times, steps = np.asarray(columns[_TIMES[kind]]), np.asarray(columns["step"])
    return schema.Chunk(
        kind=kind, attempt=attempt, rank=rank, host=host, count=len(times),
        time_lo_ns=int(times.min()), time_hi_ns=int(times.max()), data=encode_chunk(columns),
        step_lo=int(steps.min()), step_hi=int(steps.max()),
    )  # fmt: skip
