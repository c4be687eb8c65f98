"""Chunks and rows as they were stored, made into record batches of Arrow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rankscope.data.kinds import may_be_unknown, schema_of
from rankscope.wire.chunk import RANK, Column, Words, decode_chunks
from rankscope.wire.sample_columns import SAMPLE_COLUMNS
from rankscope.wire.schema import FLOAT_COLUMNS, STATES
from rankscope.wire.stored import RowPage, StoredChunk

Array = np.ndarray[Any, np.dtype[Any]]
Range = tuple[int, int]


def batches_of(
    kind: str, chunks: Sequence[StoredChunk], steps: Range | None, ranks: Sequence[Range]
) -> list[pa.RecordBatch]:
    """Return the events of chunks that are of these steps and ranks (both ends included).

    Raises `rankscope.wire.chunk.ChunkError` where a chunk is damaged.
    """
    found = []
    for chunk, columns in zip(chunks, decode_chunks(one.data for one in chunks), strict=True):
        batch = _batch_of(kind, chunk, columns, steps, ranks)
        if batch.num_rows:
            found.append(batch)
    return found


def _batch_of(
    kind: str,
    chunk: StoredChunk,
    columns: dict[str, Column],
    steps: Range | None,
    ranks: Sequence[Range],
) -> pa.RecordBatch:
    count = len(next(iter(columns.values())))
    who = np.asarray(columns.get(RANK, np.broadcast_to(np.int64(chunk.rank), count)))
    keep = np.ones(count, bool)
    if steps is not None and "step" in columns:
        numbers = np.asarray(columns["step"])
        keep &= (numbers >= steps[0]) & (numbers <= steps[1])
    if ranks:
        keep &= np.any([(who >= lo) & (who <= hi) for lo, hi in ranks], axis=0)
    rows = np.flatnonzero(keep)
    schema = schema_of(kind)
    arrays = []
    for field in schema:
        if field.name == "attempt":
            arrays.append(pa.array(np.full(len(rows), chunk.attempt, np.int32)))
        elif field.name == "host":
            arrays.append(_words(Words(np.zeros(len(rows), np.int64), [chunk.host])))
        elif field.name == "rank" and kind not in SAMPLE_COLUMNS:
            arrays.append(pa.array(who[rows].astype(np.int32)))
        else:
            arrays.append(_array_of(kind, field, columns.get(field.name), rows))
    return pa.record_batch(arrays, schema=schema)


def _array_of(kind: str, field: pa.Field, column: Column | None, rows: Array) -> pa.Array:
    """Return a column; all null where the agent that sent the chunk did not know it."""
    if column is None:
        return pa.nulls(len(rows), field.type)
    if isinstance(column, Words | list):
        coded = Words.of(column)
        return _words(Words(coded.codes[rows], coded.words))
    values = np.asarray(column)[rows]
    if pa.types.is_dictionary(field.type):
        return _words(Words(np.clip(values, 0, len(STATES) - 1), list(STATES)))
    is_null = np.zeros(len(values), bool)
    if may_be_unknown(kind, field.name):
        is_null = values < 0
    elif (kind, field.name) == ("collectives", "sequence"):
        is_null = values == 0
    if field.name in FLOAT_COLUMNS:
        is_null |= np.isnan(values)
    return pa.array(values, field.type, mask=is_null)


def _words(column: Words) -> pa.Array:
    """Return a column of words; the empty one is not known."""
    blank = [not word for word in column.words]
    codes = column.codes.astype(np.int32)
    mask = np.array(blank, bool)[codes] if any(blank) else None
    return pa.DictionaryArray.from_arrays(
        pa.array(codes, pa.int32(), mask=mask), pa.array(column.words, pa.string())
    )


def batch_of_rows(kind: str, page: RowPage) -> pa.RecordBatch:
    """Return a page of rows; a column that an older server lacks is all null."""
    schema = schema_of(kind)
    cells = dict(zip(page.columns, zip(*page.rows, strict=True), strict=True)) if page.rows else {}
    nothing = (None,) * len(page.rows)
    return pa.record_batch(
        [pa.array(cells.get(field.name, nothing), field.type) for field in schema], schema=schema
    )
