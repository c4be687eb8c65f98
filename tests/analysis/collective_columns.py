"""Columns of collectives by when each began and ended."""

from __future__ import annotations

import numpy as np

from rankscope.wire import schema
from rankscope.wire.chunk import Column
from tests.analysis.records import START_NS

MS = 1_000_000


def columns_of(starts: np.ndarray, ends: np.ndarray, first: int = 1) -> dict[str, Column]:
    count = len(starts)
    arrived = START_NS + (starts * MS).astype(np.int64)
    columns: dict[str, Column] = {
        name: np.zeros(count, np.int64) for name in schema.COLLECTIVE_COLUMNS
    }
    columns |= {
        "arrived_ns": arrived, "duration_ns": START_NS + (ends * MS).astype(np.int64) - arrived,
        "sequence": np.arange(first, first + count), "size_bytes": np.full(count, 4096),
        "state": np.full(count, schema.ENDED), "step": np.full(count, 2),
        "group": ["world"] * count, "operation": ["all_reduce"] * count,
    }  # fmt: skip
    for name in ("dtype", "reduce_op", "call_site", "issued_by", "ended_by"):
        columns[name] = [""] * count
    return columns
